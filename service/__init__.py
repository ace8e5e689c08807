"""How people and machines reach it: command line and BentoML service."""
