"""What it costs to run a candidate or a reorder on this machine: modelled, measured, remembered."""
