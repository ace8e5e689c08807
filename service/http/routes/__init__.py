"""The addresses under /v1, one module per subject; each has `routes(backend)`."""
