#!/usr/bin/env python3
"""Which of several CUDA libraries a bundle takes. Empty files stand for libraries; no driver is needed."""
import os
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
import libraries  # noqa: E402

BUILT = {"cublasLt": "13.1.0", "cudnn": "9.19.0", "nccl": "2.28.9"}


class LibrariesTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root, self.versions = pathlib.Path(temporary.name).resolve(), {}

    def folder(self, name, **versions):
        """A folder with libraries of these versions; None: a file that does not load."""
        folder = self.root / name
        folder.mkdir()
        for library, version in versions.items():
            (folder / libraries.SONAMES[library]).touch()
            self.versions[folder, library] = version
        return folder

    def find(self, *folders, named=()):
        with unittest.mock.patch.object(libraries, "candidate_folders", lambda: [*named, *folders]), \
                unittest.mock.patch.object(libraries, "named_folders", lambda: list(named)):
            return libraries.find(BUILT, lambda folder, name: self.versions[folder, name])

    def test_each_library_is_the_newest_that_is_not_too_old(self):
        toolkit = self.folder("toolkit", cublasLt="13.0.2", nccl="2.29.1")
        wheels = self.folder("wheels", cublasLt="13.1.0", nccl="2.28.9", cudnn="9.19.0")
        found = self.find(toolkit, wheels)
        self.assertEqual((found["cublasLt"], found["nccl"], found["cudnn"]), (wheels, toolkit, wheels))

    def test_versions_are_compared_as_numbers(self):
        nine, ten = self.folder("nine", cublasLt="13.9.0"), self.folder("ten", cublasLt="13.10.0")
        self.assertEqual(self.find(nine, ten)["cublasLt"], ten)

    def test_another_major_version_is_not_taken_for_being_newer(self):
        wheels, future = self.folder("wheels", nccl="2.28.9"), self.folder("future", nccl="3.0.0")
        self.assertEqual(self.find(future, wheels)["nccl"], wheels)

    def test_where_all_are_too_old_the_newest_is_refused_by_its_version(self):
        old, older = self.folder("old", cudnn="9.18.1"), self.folder("older", cudnn="9.10.0")
        self.assertEqual(self.find(older, old)["cudnn"], old)
        facts = {name: {"version": version, "path": "p"} for name, version in (("cublasLt", None), ("cudnn", "9.18.1"), ("nccl", "2.28.9"))}
        problems = libraries.refusals(facts, BUILT)
        self.assertEqual(len(problems), 1)
        self.assertIn("cudnn 9.18.1 (p): expected 9, at least 9.19.0", problems[0])

    def test_a_folder_that_a_person_named_wins_unless_it_is_too_old(self):
        named, newer = self.folder("named", nccl="2.28.9", cublasLt="13.0.0"), self.folder("newer", nccl="2.29.0", cublasLt="13.2.0")
        found = self.find(newer, named=[named])
        self.assertEqual((found["nccl"], found["cublasLt"]), (named, newer))

    def test_a_file_that_does_not_load_is_left_for_one_that_does(self):
        broken, wheels = self.folder("broken", nccl=None), self.folder("wheels", nccl="2.28.9")
        self.assertEqual(self.find(broken, wheels)["nccl"], wheels)

    def test_the_one_file_there_is_need_not_be_asked(self):
        only = self.folder("only", nccl=None)
        self.assertEqual(self.find(only), {"cublasLt": None, "cudnn": None, "nccl": only, "nvrtc": None})

    def test_links_have_all_parts_of_a_library_and_nothing_of_its_neighbours(self):
        a, b = self.folder("a", cudnn="9.19.0", nccl="2.20.0"), self.folder("b", nccl="2.28.9")
        (a / "libcudnn_graph.so.9").touch()
        linked = libraries.link({"cudnn": a, "nccl": b, "cublasLt": None}, self.root / "lib")
        self.assertEqual({file.name: file.resolve().parent for file in linked.iterdir()},
                         {"libcudnn.so.9": a, "libcudnn_graph.so.9": a, "libnccl.so.2": b})

    def test_named_folders_that_are_there_are_searched_first(self):
        named = self.folder("named")
        with unittest.mock.patch.dict(os.environ, {"RAVEL_CUDA_LIBRARY_PATH": f"{self.root}/absent:{named}"}):
            self.assertEqual(libraries.candidate_folders()[0], named)

    def test_a_folder_without_the_library_has_no_version(self):
        with unittest.mock.patch.dict(os.environ, {"LD_LIBRARY_PATH": ""}):
            (self.root / libraries.SONAMES["nccl"]).write_text("no library")
            self.assertIsNone(libraries.version_in(self.root, "nccl"))


if __name__ == "__main__":
    unittest.main()
