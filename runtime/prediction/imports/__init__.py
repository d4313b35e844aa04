"""What other systems log of a run, read and fitted to the models of the simulation."""
