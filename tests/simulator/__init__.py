"""A deterministic simulator: the real coordinator and participants' code on a simulated world, one seed, one thread."""
