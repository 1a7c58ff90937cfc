"""Networks: actor-critic networks, Q-networks, and the user's own modules."""
