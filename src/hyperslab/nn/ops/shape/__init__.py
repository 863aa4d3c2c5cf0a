"""Functions that move, choose and join elements without computing with them."""
