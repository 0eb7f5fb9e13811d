"""`kvplane.lmcache` with stand-ins for LMCache, in a process of its own: another test may import the real one."""

import unittest

import bed


class Steps(unittest.TestCase):
    """Runs `lmcache_steps.py` in the tests' cluster."""

    def test_the_adapter_with_stand_ins(self):
        bed.bed()
        bed.python("import unittest; unittest.main('lmcache_steps')", timeout=600)


if __name__ == "__main__":
    unittest.main()
