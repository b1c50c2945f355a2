"""Animated pictures for docs/, of pages that tests have opened."""

from __future__ import annotations

import os
from io import BytesIO

import pytest
from desktop import Tab
from PIL import Image

#: Milliseconds that a frame is shown, and at least between two of them.
FRAME = 200
#: Milliseconds that the frames at the story's turns are shown.
PAUSE = 1800
#: Pixels; the window has half as many again each way: all of the tool bar fits into it.
SIZE = (800, 320)

for_docs = pytest.mark.skipif(
    "GPU_CKPT_PICTURES" not in os.environ, reason="pictures for docs/: set GPU_CKPT_PICTURES to a directory"
)


class Film:
    """Screenshots that become one animation."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []

    def frame(self, duration: int = FRAME) -> None:
        shot = Image.open(BytesIO(self.tab.page.screenshot())).convert("RGB").resize(SIZE)
        if self.frames and shot.tobytes() == self.frames[-1].tobytes():
            self.durations[-1] += duration
        else:
            self.frames.append(shot)
            self.durations.append(duration)

    def until(self, selector: str, text: str) -> None:
        """Film until an element with that text is shown."""
        wanted = self.tab.page.locator(selector, has_text=text).first
        for _ in range(300):
            if wanted.is_visible():
                return
            self.frame()
            self.tab.page.wait_for_timeout(FRAME)
        raise AssertionError(f"{text!r} was never shown")

    def save(self, name: str) -> None:
        first, *rest = self.frames
        path = self.tab.window.pictures / f"{name}.webp"
        first.save(path, save_all=True, append_images=rest, duration=self.durations, loop=0, method=6, quality=60)
