"""What a model writes when it calls tools: which format its chat template has, how a text of it is read
and written."""
