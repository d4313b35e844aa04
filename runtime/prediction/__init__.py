"""What a run will come to before it is paid for: models fitted to recorded runs, played on the virtual clock."""
