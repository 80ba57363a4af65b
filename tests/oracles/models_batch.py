"""The layout of a model step, request by request, cell by cell."""


def lay_out(requests, chunk, num_cells, num_rows):
    """Cells, rows and state writes of a step.

    Args:
      requests: dicts with start, count, decode, last, load, store, points (position to
        slot), in the order of the table; count 0: does nothing.
      chunk: tokens of a cell.
      num_cells: cells that there is room for.
      num_rows: rows that there is room for.

    Returns:
      A dict of lists, and the number of things that found no room.
    """
    cells, rows, writes, missed = [], [], [], 0
    for index, request in enumerate(requests):
        start, end = request["start"], request["start"] + request["count"]
        if request["count"] == 0:
            continue
        if request["decode"]:
            if len(rows) == num_rows:
                missed += 1
            else:
                rows.append((index, start, request["load"], request["store"]))
            continue
        filed = [(end, request["store"], request["last"])]
        filed += [(p, slot, False) for p, slot in request["points"]]
        first = len(cells)
        begin = start // chunk * chunk
        while begin < end:
            is_first = len(cells) == first
            cells.append(
                dict(
                    owner=index,
                    start=begin,
                    first_fresh=start - begin if is_first else 0,
                    fill=min(chunk, end - begin),
                    is_first=is_first,
                    load=request["load"] if is_first else 0,
                )
            )
            begin += chunk
        for point, slot, last in filed:
            if not start < point <= end or slot <= 0:
                continue
            cell = first + (point - 1) // chunk - start // chunk
            count = point - (point - 1) // chunk * chunk
            if cell < num_cells:
                writes.append((cell, count, slot, last or count == chunk))
    missed += max(0, len(cells) - num_cells)
    return dict(cells=cells[:num_cells], rows=rows, writes=writes), missed
