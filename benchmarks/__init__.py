"""Measurements that anyone can run again; raw results are committed under results/."""
