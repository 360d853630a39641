"""Laws that every method keeps, by being registered; see `examples` for what they are tried on."""
