"""From an imported graph to a model that is ready to run: the stages in their order, and the attempts in them."""
