"""The stock process groups that `bench_groups.py` measures: the layout by which they are called."""

import ctypes
import pathlib
import re
import sys
import unittest

PYTHON = pathlib.Path(__file__).resolve().parents[1]
HEADER = PYTHON.parent / "capi" / "include" / "mooncake_pg.h"
sys.path.insert(0, str(PYTHON))

import stock_pg  # noqa: E402


class Layout(unittest.TestCase):
    """The description of a communicator, beside what the header asserts of it."""

    def test_the_description_has_the_layout_of_the_header(self):
        text = HEADER.read_text(encoding="utf-8")
        offsets = dict(re.findall(r"offsetof\(mooncakePgCommConfig_t, (\w+)\) == (\d+)", text))
        self.assertIn("activeRanksMirror", offsets)
        for name, at in offsets.items():
            self.assertEqual(getattr(stock_pg._Config, name).offset, int(at), name)
        size = re.search(r"sizeof\(mooncakePgCommConfig_t\) == (\d+)", text).group(1)
        self.assertEqual(ctypes.sizeof(stock_pg._Config), int(size))

    def test_fields_have_the_names_and_order_of_the_header(self):
        text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
        fields = re.search(r"typedef struct mooncakePgCommConfig \{(.*?)\}", text, re.DOTALL).group(1)
        names = [line.split()[-1].lstrip("*") for line in fields.split(";") if line.strip()]
        self.assertEqual([name for name, _ in stock_pg._Config._fields_], names)

    def test_constants_are_those_of_the_header(self):
        text = HEADER.read_text(encoding="utf-8")
        magic = re.search(r"COMM_CONFIG_MAGIC (\w+)", text).group(1)
        version = re.search(r"COMM_CONFIG_VERSION (\d+)u", text).group(1)
        numbers = dict(re.findall(r"(mooncakePg\w+) = (\d+)", text))
        self.assertEqual((stock_pg._MAGIC, stock_pg._CONFIG_VERSION), (int(magic, 16), int(version)))
        used = {"DeviceCpu": stock_pg._CPU, "Float32": stock_pg._FLOAT32, "Sum": stock_pg._SUM}
        for name, number in used.items():
            self.assertEqual(int(numbers[f"mooncakePg{name}"]), number, name)


if __name__ == "__main__":
    unittest.main()
