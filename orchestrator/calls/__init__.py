"""What a model writes when it calls tools: which format its chat template has, and how a text of it is read."""
