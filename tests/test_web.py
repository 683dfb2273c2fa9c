"""The page's own files: messages of both languages, one script out of all modules, node's tests."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from browsing import missing

ROOT = Path(__file__).parent.parent
WEB = ROOT / "src" / "scaledot" / "web"
SCRIPTS = sorted(WEB.glob("*.js"))
PLACEHOLDER = re.compile(r"\{(\w+)\}")
KANA = re.compile(r"[ぁ-んァ-ヶ一-龠]")

IMPORT = re.compile(r'^import (?:\{ ([^}]*) \} from )?"\./([\w-]+\.js)";$', re.M)
TOP = re.compile(r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)", re.M)
EXPORT = re.compile(r"^export (?:async )?(?:function\*?|const|let|class) (\w+)", re.M)


def catalogue(language, files=("messages", "timeline")):
    pairs = [
        pair
        for name in files
        for pair in json.loads(
            (WEB / f"{name}.{language}.json").read_text(encoding="utf-8"), object_pairs_hook=list
        )
    ]
    assert len({key for key, _ in pairs}) == len(pairs), "a key is there twice"
    return dict(pairs)


def test_both_languages_have_the_same_keys_and_placeholders():
    english, japanese = catalogue("en"), catalogue("ja")
    assert english.keys() == japanese.keys()
    for key, text in english.items():
        assert text.strip(), key
        assert japanese[key].strip(), key
        found = [set(PLACEHOLDER.findall(x[key])) for x in (english, japanese)]
        if key.startswith("finding."):  # English is the pattern: Japanese may leave values out
            assert found[1] <= found[0], key
        else:
            assert found[0] == found[1], key


def test_what_every_page_needs_says_nothing_of_training_runs():
    """Words of a run are not in a report that holds none."""
    inside = (WEB / "timeline.js", WEB / "alarmwords.js")
    plain = "".join(x.read_text(encoding="utf-8") for x in SCRIPTS if x not in inside)
    for key in catalogue("en", ["timeline"]):
        assert key.startswith("timeline."), key
        # The window's title is of the shell, where there is a run.
        assert f'"{key}"' not in plain or key == "timeline.title", key
    assert not any(key.startswith("timeline.") for key in catalogue("en", ["messages"]))


def test_the_japanese_catalogue_is_japanese():
    english, japanese = catalogue("en"), catalogue("ja")
    same = {x for x in english if english[x] == japanese[x] and len(english[x]) > 12}
    assert not {x for x in same if re.search(r"[a-z]{4,} [a-z]{3,}", english[x])}
    kana = [key for key in japanese if KANA.search(japanese[key])]
    assert len(kana) > 0.8 * len(japanese)
    for key, text in japanese.items():
        assert not re.search(r"[ぁ-んァ-ヶ一-龠][,.!?:;]", text), f"{key}: half-width {text}"


def test_every_message_that_a_script_names_exists():
    english = catalogue("en")
    prefixes = "|".join(sorted({key.partition(".")[0] for key in english}))
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        for key in re.findall(rf'"((?:{prefixes})\.[a-z_\d]+)"', text):
            assert key in english, f"{script.name}: {key}"
        for stem in re.findall(rf"`((?:{prefixes})\.[a-z_\d]*)\$\{{", text):
            assert any(key.startswith(stem) for key in english), f"{script.name}: {stem}"


def test_no_message_is_left_over():
    text = "\n".join(x.read_text(encoding="utf-8") for x in SCRIPTS)
    stems = re.findall(r"`(\w+\.[a-z_\d]*)\$\{", text)
    for key in catalogue("en"):
        used = f'"{key}"' in text or any(key.startswith(stem) for stem in stems)
        assert used, f"no script says {key}"


def test_modules_make_one_script():
    """The report drops import lines and the word export: every name is unique over all files, and
    what is imported is exported there."""
    home = {}
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        for name in TOP.findall(text):
            assert name not in home, f"{name} is in {home[name]} and {script.name}"
            home[name] = script.name
    exported = {x.name: set(EXPORT.findall(x.read_text(encoding="utf-8"))) for x in SCRIPTS}
    for script in SCRIPTS:
        text = script.read_text(encoding="utf-8")
        assert len(re.findall(r"^import\b", text, re.M)) == len(IMPORT.findall(text)), script.name
        for names, source in IMPORT.findall(text):
            asked = {x.strip() for x in names.split(",") if x.strip()}
            assert asked <= exported[source], f"{script.name} from {source}"
            for name in asked:
                spread = text.replace("...", " ")
                uses = len(re.findall(rf"(?<![\w.]){re.escape(name)}\b", spread))
                assert uses > 1, f"{script.name} imports {name} and never uses it"


def test_nothing_is_loaded_from_elsewhere_and_no_markup_is_made_of_data():
    for file in [*SCRIPTS, *WEB.glob("*.css"), *WEB.glob("*.html")]:
        text = file.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{file.name}: {word}"
        assert not re.search(r"setAttribute\(\s*[\"']style", text), (
            f"{file.name}: the policy of the server forbids style attributes"
        )


def test_node_runs_the_tests_of_the_shell():
    node = shutil.which("node")
    if node is None:
        missing("node is missing: apt-get install nodejs")
    files = [
        str(ROOT / "tests" / "web" / x)
        for x in ("state.test.js", "shell.test.js", "timeline.test.js")
    ]
    done = subprocess.run([node, "--test", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_errors_that_are_translated_are_those_of_the_server():
    source = "".join(
        (WEB.parent / name).read_text(encoding="utf-8") for name in ("server.py", "exploring.py")
    )
    joined = re.sub(r'"\n\s*f?"', "", source)
    page = (WEB / "under.js").read_text(encoding="utf-8")
    for name, start in (("PROBLEMS", "error."), ("REASONS", "shell.unobserved_")):
        sentences = [text for key, text in catalogue("en").items() if key.startswith(start)]
        count = re.search(rf"const {name} = (\d+);", page)
        assert int(count[1]) == len(sentences)
        for sentence in sentences:
            for piece in PLACEHOLDER.split(sentence)[::2]:
                assert piece in joined, sentence
