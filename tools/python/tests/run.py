"""Runs all tests, or those named as arguments (`test_store`, `test_store.Puts.test_empty`)."""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import bed  # noqa: E402


def main():
    """Returns exit status 0 if all tests passed; prints the skipped ones."""
    loader = unittest.TestLoader()
    names = sys.argv[1:]
    suite = loader.loadTestsFromNames(names) if names else loader.discover(str(HERE))
    try:
        result = unittest.TextTestRunner(verbosity=1).run(suite)
    finally:
        bed.close()
    for test, reason in result.skipped:
        print(f"skipped: {test.id()}: {reason}")
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
