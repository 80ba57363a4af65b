"""Publication of snapshot points: where a prompt's state is to be kept."""


def published_points(
    num_prompt_tokens,
    enable_prefix_caching=True,
    snapshot_interval=None,
    offsets_from_start=(),
    offsets_from_end=(),
    requested_points=(),
    save_last=False,
    block_size=1,
):
    """Positions inside the prompt at which a state is to be filed, ascending.

    `requested_points` are the caller's own for this request. `save_last` adds the last
    block boundary that an identical prompt can reach: a duplicate matches at most all
    tokens but one.
    """
    if not enable_prefix_caching:
        return []
    points = set()
    step = snapshot_interval or 0
    if step > 0:
        points.update(range(step, num_prompt_tokens + 1, step))
    for offset in offsets_from_start:
        if offset <= num_prompt_tokens:
            points.add(offset)
    for offset in offsets_from_end:
        if num_prompt_tokens - offset > 0:
            points.add(num_prompt_tokens - offset)
    for point in requested_points:
        if 0 < point <= num_prompt_tokens:
            points.add(point)
    if save_last:
        last = (num_prompt_tokens - 1) // block_size * block_size
        if last > 0:
            points.add(last)
    return sorted(points)
