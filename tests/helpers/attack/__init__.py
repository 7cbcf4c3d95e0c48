"""Random combinations of valid values at every route that takes a body: none may end in a 5xx."""
