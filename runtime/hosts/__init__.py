"""The hosts: what carries out the commands of the seven actors, on real machines or on a virtual clock."""
