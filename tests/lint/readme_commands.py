#!/usr/bin/env python3
"""The commands that README files show exist: scripts, presets, build targets' binaries, verbs and flags of ravelctl.

    tests/lint/readme_commands.py [ROOT]

Reads the fenced blocks of every README.md that begin with ```sh, ```bash or ```console (there, lines after `$ `).
Prints `path:line: what does not exist`; exits 1 if anything was printed.
"""
import json
import pathlib
import re
import shlex
import sys

FENCE = re.compile(r"^\s*```\s*(\w*)")
ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
SHELL = {"cd", "git", "export", "ls", "cat", "less", "kill", "ninja", "watch", "jq", "apt-get", "curl", "env", "time", "kubectl",
         "skopeo", "openssl", "chmod", "mkdir", "cp", "rm"}
GROUPS = {"nodes", "checkpoints", "data"}  # verbs of ravelctl that have verbs of their own
INTERPRETERS = {"bash", "sh", "python3"}
BINARIES = {  # program -> where its verbs and flags are defined
    "ravelctl": "coordinator/ctl",
    "ravel-coordinator": "coordinator",
    "ravel-store": "worker/store",
    "ravel-worker": "worker/daemon",
    "ravel-trainer": "worker/trainer",
}


def shown_commands(text):
    """(line number, command) of each command in the shell blocks; a trailing backslash joins lines."""
    kind, pending, start = None, "", 0
    for number, line in enumerate(text.split("\n"), 1):
        fence = FENCE.match(line)
        if fence:
            kind = None if kind is not None else fence[1]
            continue
        if kind not in ("sh", "bash", "console"):
            continue
        code = line.strip()
        if kind == "console" and not pending:
            if not code.startswith("$ "):
                continue
            code = code[2:]
        start = start if pending else number
        pending += code.removesuffix("\\")
        if code.endswith("\\"):
            continue
        if pending and not pending.startswith("#"):
            yield start, pending
        pending = ""


def simple_commands(command):
    """Words of each command of a pipeline or list."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words, redirect = [], False
    for word in lexer:
        if set(word) <= set("|&;"):
            yield words
            words = []
        elif set(word) <= set("<>"):
            redirect = True
        elif redirect:
            redirect = False
        elif words or not ASSIGNMENT.match(word):
            words.append(word)
    yield words


class Checker:
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.sources = {}
        self.cmake_texts = []
        presets = self.root / "CMakePresets.json"
        self.presets = set()
        if presets.exists():
            self.presets = {p["name"] for p in json.loads(presets.read_text())["configurePresets"]}

    def text_of(self, folder):
        if folder not in self.sources:
            files = [p for p in (self.root / folder).rglob("*.cc")] + [p for p in (self.root / folder).rglob("*.h")]
            self.sources[folder] = "".join(p.read_text(errors="replace") for p in files)
        return self.sources[folder]

    def build_files(self):
        if not self.cmake_texts:
            tops = [p for p in self.root.iterdir() if p.is_dir() and p.name not in ("build", ".git")]
            self.cmake_texts = [p.read_text() for top in tops for p in top.rglob("CMakeLists.txt")]
        return self.cmake_texts

    def problems(self, words):
        if not words:
            return
        program, rest = words[0], words[1:]
        if program in INTERPRETERS and rest and not rest[0].startswith("-"):
            program, rest = rest[0], rest[1:]
        name = program.rsplit("/", 1)[-1]
        if name in BINARIES:
            yield from self.problems_of_binary(name, rest)
        elif program in ("cmake", "ctest"):
            yield from self.problems_of_presets(program, rest)
        elif program.startswith("build/"):
            if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in self.build_files()):
                yield f"no CMakeLists.txt builds {name}"
        elif "/" in program or program.endswith((".sh", ".py")):
            yield from self.problems_of_script(program, rest)
        elif program not in SHELL:
            yield f"nobody knows the command {program}"

    def problems_of_binary(self, name, rest):
        source = self.text_of(BINARIES[name])
        verbs = True
        for word in rest:
            if word.startswith("-"):
                flag = word.split("=")[0]
                if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", source):
                    yield f"{name} has no flag {flag}"
                verbs = False
            elif verbs and re.fullmatch(r"[a-z][a-z-]*", word) and name == "ravelctl":
                if f'"{word}"' not in source:
                    yield f"ravelctl has no verb {word}"
                verbs = word in GROUPS
            else:
                verbs = False

    def problems_of_presets(self, program, rest):
        for flag, value in zip(rest, rest[1:]):
            if flag == "--preset" and value not in self.presets:
                yield f"{program}: there is no preset {value}"

    def problems_of_script(self, program, rest):
        path = self.root / program
        if not path.is_file():
            yield f"there is no file {program}"
            return
        text = path.read_text(errors="replace")
        for word in rest:
            flag = word.split("=")[0]
            if flag.startswith("--") and flag not in text:
                yield f"{program} has no flag {flag}"

    def run(self):
        found = []
        for path in sorted(self.root.rglob("README.md")):
            relative = path.relative_to(self.root)
            if relative.parts[0] in ("build", ".git"):
                continue
            for line, command in shown_commands(path.read_text()):
                for words in simple_commands(command):
                    found += [(str(relative), line, problem) for problem in self.problems(words)]
        return found


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[2]
    found = Checker(root).run()
    for path, line, problem in found:
        print(f"{path}:{line}: {problem}")
    print(f"readme commands: {len(found)} problem(s)" if found else "readme commands: ok")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
