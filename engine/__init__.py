"""How one counterfactual is made: path, prior, loop, masks, guidance, surrogate, runtimes."""
