"""A plugin of polopt: the optimizer `slow_momentum` and the policy `huber_a2c`."""
