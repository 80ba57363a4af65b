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
    tokens but one. As published, it does nothing without a periodic interval.
    """
    if not enable_prefix_caching:
        return []
    points = set()
    periodic = snapshot_interval is not None and snapshot_interval > 0
    if periodic:
        points.update(
            range(snapshot_interval, num_prompt_tokens + 1, snapshot_interval)
        )
    for offset in offsets_from_start:
        if offset <= num_prompt_tokens:
            points.add(offset)
    for offset in offsets_from_end:
        if num_prompt_tokens - offset > 0:
            points.add(num_prompt_tokens - offset)
    for point in requested_points:
        if 0 < point <= num_prompt_tokens:
            points.add(point)
    if save_last and periodic:
        last = (num_prompt_tokens - 1) // block_size * block_size
        if last > 0:
            points.add(last)
    return sorted(points)
