"""Fast parser for plain lines of a block trace: five decimal integers separated by blanks, then a line end."""

from __future__ import annotations

from csd_io.compiled import njit

FIELDS = "time_ns", "device", "lba", "sectors", "op"
MAX_NS, MAX_LBA, MAX_SECTORS = 1 << 61, 1 << 48, 1 << 22  # 73 years, 128 PiB, 2 GiB
MAX_DEVICE = 1 << 32
MAX_DIGITS = 18  # a number of this length fits in 63 bits

_NEWLINE, _RETURN, _BLANK, _TAB, _ZERO = 10, 13, 32, 9, 48


@njit(cache=True, nogil=True)
def parse_lines(text, at, requests, count):  # type: ignore[no-untyped-def]
    """Append the requests of plain lines to `requests`; stop at the first line that is not plain or out of range.

    Args:
        text: Content of the file, (bytes,).
        at: Byte offset of the first line to parse.
        requests: Output rows, (N, 5); the first `count` rows are filled already.
        count: Rows filled so far.

    Returns:
        Byte offset of the line at which parsing stopped, number of lines parsed, and rows filled now.
    """
    lines = 0
    while at < text.size:
        begin, field = at, 0
        while at < text.size and text[at] != _NEWLINE:
            byte = text[at]
            if byte in (_BLANK, _TAB):
                at += 1
                continue
            if byte == _RETURN and at + 1 < text.size and text[at + 1] == _NEWLINE:
                at += 1
                continue
            value, first = 0, at
            while at < text.size and _ZERO <= text[at] <= _ZERO + 9 and at - first < MAX_DIGITS:
                value = 10 * value + (text[at] - _ZERO)
                at += 1
            if at == first or field == 5 or (at < text.size and text[at] > _BLANK):
                return begin, lines, count
            requests[count, field] = value
            field += 1
        if field == 5:
            time_ns, device, lba, sectors, op = requests[count]
            if time_ns >= MAX_NS or device >= MAX_DEVICE or lba >= MAX_LBA or not 1 <= sectors < MAX_SECTORS or op > 1:
                return begin, lines, count
            count += 1
        elif field:
            return begin, lines, count
        at += 1
        lines += 1
    return text.size, lines, count
