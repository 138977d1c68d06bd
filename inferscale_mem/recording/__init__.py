"""How records come to be: in the background, in order, again after a loss, and never of what was deleted."""
