"""A reward function of one's own, for examples/grpo.yaml: called as TRL calls them."""


def brief(completion_ids: list[list[int]], **columns: list) -> list[float]:
    """Reward short answers: 1 for one of no tokens, 0 for one of 32 or more."""
    return [max(0.0, 1 - len(ids) / 32) for ids in completion_ids]
