"""What runs beside an agent: started, found by name, watched, blamed, asked for its state."""
