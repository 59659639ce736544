"""What every command needs from the machine: errors, devices, processes, files, plots."""
