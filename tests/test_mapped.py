"""Pages in a file without a name."""

from __future__ import annotations

import os

import pytest
import torch

from wakekv.cache.mapped import mapped
from wakekv.errors import InputError


def test_it_is_zero_holds_what_is_written_and_leaves_no_file(tmp_path):
    folder = tmp_path / "pages"
    room = mapped((3, 4), torch.bfloat16, folder)
    assert room.shape == (3, 4) and room.dtype == torch.bfloat16 and not room.any()
    room[1] = 2
    assert room.sum() == 8 and os.listdir(folder) == []
    assert mapped((0, 4), torch.float32, folder).shape == (0, 4)


def test_what_is_no_folder_and_what_has_no_room_are_told_before_anything_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file cannot be written"):
        mapped((1,), torch.float32, tmp_path / "file")
    with pytest.raises(InputError, match="free some or choose another place"):
        mapped((1 << 50,), torch.int8, tmp_path / "pages")
    assert os.listdir(tmp_path) == ["file"]
