"""Other trainers than Atropos': one file each. Nobody else knows their libraries."""
