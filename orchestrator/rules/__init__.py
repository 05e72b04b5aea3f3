"""Rules that all rooms share: functions of their arguments, without input or output."""
