"""Tests of the network: links, weights, distributions and the two timelines."""
