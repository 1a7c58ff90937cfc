"""Self-play on `connect_four_v3`: a policy learns against itself and against its past.

    polopt train connect_four_self_play

The callbacks `SelfPlay` add a copy of the policy `main` from time to time. The copies do not learn.
`Opponents` draws the opponent of each game.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import polopt

#: Iterations between two copies, and the largest number of copies.
EVERY, MOST = 10, 5
#: Games against random play after each copy.
GAMES = 40
#: The key of `SelfPlay` in results.
SCORE = "score_against_random_mean"


class Opponents:
    """A `policy_mapping_fn`. The policy `main` has one of the seats, and begins in every second
    game. Its opponent is itself in half of the games, and otherwise one of its copies.

    Args:
        copies: the names of the copies.
    """

    def __init__(self, copies: Sequence[str]) -> None:
        self.copies = tuple(copies)

    def __call__(self, agent_id: str, episode: Any, rng: np.random.Generator) -> str:
        """Returns the policy of an agent in an episode."""
        if (agent_id == "player_0") == (episode.number % 2 == 0) or rng.random() < 0.5:
            return "main"
        return self.copies[rng.integers(len(self.copies))]


class SelfPlay(polopt.Callbacks):
    """Adds a copy of `main` after the first iteration and after every `EVERY` iterations. Of more
    than `MOST` copies, the first and the newest stay. The first copy is a beginner. Against it,
    `main` learns to answer moves that good players do not make. Reports the share of games that
    `main` wins against random play."""

    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        """See `polopt.Callbacks`."""
        iteration = result["training_iteration"]
        if iteration != 1 and iteration % EVERY:
            return
        share = score(trainer.get_policy("main"), None, GAMES, seed=iteration)
        result["env_runners"].setdefault("custom_metrics", {})[SCORE] = share
        first, *newer = [*trainer.get_policy().policies, f"main_{iteration}"][1:]  # without `main`
        removed = newer[: 1 - MOST]
        opponents = Opponents([first, *newer[len(removed) :]])
        trainer.add_policy(f"main_{iteration}", copy_of="main", policy_mapping_fn=opponents)
        for name in removed:
            trainer.remove_policy(name)


def score(policy: Any, opponent: Any, games: int, seed: int) -> float:
    """Plays games of connect four, and returns the share that `policy` wins. A draw counts one
    half. Each side begins in every second game.

    Args:
        policy: a policy.
        opponent: another policy. Both sample their actions, because otherwise all games would be
            the same. None means random allowed actions, and `policy` then plays its most likely
            actions.
        games: the number of games.
        seed: the seed of random actions.
    """
    from pettingzoo.classic import connect_four_v3

    rng, env, total = np.random.default_rng(seed), connect_four_v3.env(), 0.0
    for game in range(games):
        own = f"player_{game % 2}"
        players = {agent: policy if agent == own else opponent for agent in env.possible_agents}
        total += 0.5 + 0.5 * play(env, players, rng, sampled=opponent is not None)[own]
    env.close()
    return total / games


def play(
    env: Any, players: Mapping[str, Any], rng: np.random.Generator, sampled: bool = True
) -> dict[str, float]:
    """Plays one episode of an AECEnv of PettingZoo. Returns the return of each agent.

    Args:
        env: the environment.
        players: the policy of each agent. None means random allowed actions.
        rng: the generator of random actions, and of the seed of the episode.
        sampled: whether the policies sample their actions. False means their most likely actions.
    """
    env.reset(seed=int(rng.integers(2**31)))
    returns = dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        returns[agent] += float(reward)
        if terminated or truncated:
            action = None
        elif players[agent] is None:
            has_mask = isinstance(observation, Mapping)
            mask = observation["action_mask"] if has_mask else np.ones(env.action_space(agent).n)
            action = int(rng.choice(np.flatnonzero(mask)))
        else:
            action, _ = players[agent].predict(observation, deterministic=not sampled)
        env.step(action)
    return returns
