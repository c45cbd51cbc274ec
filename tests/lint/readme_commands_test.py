#!/usr/bin/env python3
"""readme_commands.py accepts what exists and names what does not."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import readme_commands  # noqa: E402

TREE = {
    "CMakePresets.json": '{"configurePresets": [{"name": "dev"}]}',
    "tests/run.sh": "# --all\n",
    "tests/bench/CMakeLists.txt": "ravel_benchmark(speed SRCS speed.cc)\n",
    "coordinator/ctl/verbs.cc": 'add("checkpoints"); add("list"); flag("-o,--output"); flag("--follow");\n',
}


def problems(block, kind="sh"):
    with tempfile.TemporaryDirectory() as root:
        for path, text in {**TREE, "README.md": f"# x\n```{kind}\n{block}\n```\n"}.items():
            file = pathlib.Path(root) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return [problem for _, _, problem in readme_commands.Checker(root).run()]


class ReadmeCommandsTest(unittest.TestCase):
    def test_existing_commands_pass(self):
        for command in ("bash tests/run.sh --all", "cmake --preset dev && cmake --build --preset dev",
                        "RAVEL_X=1 tests/run.sh > log  # note", "ravelctl checkpoints list JOB -o json | jq .", "build/dev/tests/bench/speed --quick",
                        "build/dev/bin/ravelctl list \\\n  --follow"):
            with self.subTest(command=command):
                self.assertEqual(problems(command), [])

    def test_missing_things_are_named(self):
        for command, word in (("bash tests/absent.sh", "absent.sh"), ("tests/run.sh --none", "--none"),
                              ("cmake --preset nope", "nope"), ("ravelctl checkpoints burn", "burn"),
                              ("ravelctl list --tree", "--tree"), ("frobnicate", "frobnicate"), ("build/dev/tests/bench/slow", "slow")):
            with self.subTest(command=command):
                found = problems(command)
                self.assertEqual(len(found), 1, found)
                self.assertIn(word, found[0])

    def test_console_blocks_hold_output_too(self):
        self.assertEqual(problems("$ ravelctl list\nNAME STATE\n", "console"), [])
        self.assertEqual(len(problems("$ ravelctl burn\n", "console")), 1)

    def test_other_blocks_are_not_commands(self):
        self.assertEqual(problems("whatever: [1, 2]", "yaml"), [])


if __name__ == "__main__":
    unittest.main()
