#!/usr/bin/env python3
"""Whether a browser has drawn every chart of a page, light and dark.

    drawn.py LIGHT.png DARK.png PAGE.html

PAGE.html is the page as the browser has laid it out, whose charts have their places as data-box="X,Y,WIDTH,HEIGHT".
"""
import itertools
import re
import struct
import sys
import zlib

GROUNDS = {"light": b"\xff\xff\xff", "dark": b"\x14\x17\x1b"}
LEFT, RIGHT = 70, 690  # of a chart: data lie between, what explains them beside
LEAST_PIXELS = 20  # of data in colour
COLOUR = 40  # a pixel has colour whose largest part is so much above its least; texts and grids are grey


def undo_filter(kind, line, before, step):
    """A row of a PNG from what is stored of it, and the row above."""
    if kind == 0:
        return line
    if kind == 1:
        row = bytearray(len(line))
        for part in range(step):
            row[part::step] = bytes(sum_ & 255 for sum_ in itertools.accumulate(line[part::step]))
        return row
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, before))
    row = bytearray(line)
    for i in range(len(row)):
        left, up, corner = (row[i - step], before[i], before[i - step]) if i >= step else (0, before[i], 0)
        if kind == 3:
            guess = (left + up) // 2
        else:  # Paeth
            p = left + up - corner
            guess = min((abs(p - left), 0, left), (abs(p - up), 1, up), (abs(p - corner), 2, corner))[2]
        row[i] = (row[i] + guess) & 255
    return row


def read_png(path):
    """The rows of a PNG of 8 bits without interlace, each a list of pixels of three bytes."""
    with open(path, "rb") as file:
        data = file.read()
    at, parts = 8, []
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at:at + 8])
        body = data[at + 8:at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", body)
            assert depth == 8 and colour in (2, 6) and not interlace, (depth, colour, interlace)
        elif kind == b"IDAT":
            parts.append(body)
        at += 12 + length
    step = 3 if colour == 2 else 4
    raw, row, rows = zlib.decompress(b"".join(parts)), bytearray(width * step), []
    for y in range(height):
        begin = y * (width * step + 1)
        row = undo_filter(raw[begin], raw[begin + 1:begin + 1 + width * step], row, step)
        rows.append([bytes(row[i:i + 3]) for i in range(0, len(row), step)])
    return rows


def look_at(theme, rows, charts):
    counts = {}
    for row in rows:
        for pixel in row:
            counts[pixel] = counts.get(pixel, 0) + 1
    ground = max(counts, key=counts.get)
    assert ground == GROUNDS[theme], f"{theme}: the ground is {ground.hex()}"
    for title, (x, y, width, height) in charts:
        assert y + height <= len(rows), f"{theme}: {title}: below the picture"
        area = [pixel for row in rows[int(y):int(y + height)] for pixel in row[int(x + LEFT):int(x + RIGHT)]]
        drawn = sum(max(pixel) - min(pixel) > COLOUR for pixel in area)
        print(f"{theme}: {title}: {drawn} pixels")
        assert drawn >= LEAST_PIXELS, f"{theme}: {title}: {drawn} pixels of data"


def main():
    light, dark, page = sys.argv[1:]
    with open(page, encoding="utf-8") as file:
        found = re.findall(r'<svg[^>]*aria-label="([^"]*)"[^>]*data-box="([^"]*)"', file.read())
    charts = [(title, tuple(map(float, box.split(",")))) for title, box in found]
    assert charts, f"{page}: no chart"
    for theme, path in (("light", light), ("dark", dark)):
        look_at(theme, read_png(path), charts)
    print(f"{len(charts)} charts are drawn, light and dark")


main()
