"""A run's record as files that trainers and data sets' libraries read as they are."""
