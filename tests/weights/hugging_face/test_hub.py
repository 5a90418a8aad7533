"""Names of the hub are downloaded and uploaded by huggingface_hub, against a stand-in of the hub's interface."""

import base64
import collections
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse

import pytest
import yaml
from huggingface_hub import constants

import infer
import megajax
import train
from megajax import hub
from megajax.convert.hugging_face import main as convert
from megajax.convert.push import main as push
from megajax.data.preprocess import main as preprocess
from megajax.weights.hugging_face.recipe import fine_tuning
from megajax.weights.sources import open_source


class Hub(http.server.ThreadingHTTPServer):
    """Repositories with one branch, main, and at most one tag, v1, of the same commit."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []
        self.read: list[str] = []
        """What was read as a whole."""
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str) -> str:
        return hashlib.sha1(json.dumps(sorted(self.files[repo])).encode()).hexdigest()

    def add(self, repo: str, folder) -> None:
        self.files[repo] |= {path.name: path.read_bytes() for path in folder.iterdir()}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.server.requests.append(path)
        self.server.tokens.add(self.headers.get("Authorization"))
        words = re.sub("^/(api/)?(models/|datasets/)?", "", path).split("/")
        repo = "/".join(words[:2])
        if repo == "org/gated":
            return self.answer(b"", 403, {"X-Error-Code": "GatedRepo"})
        if repo not in self.server.files:
            return self.answer(b"", 404, {"X-Error-Code": "RepoNotFound"})
        files, commit = self.server.files[repo], self.server.commit(repo)
        if words[2:] and words[3] not in ("main", "v1", commit):
            return self.answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        if words[2:3] == ["resolve"]:
            content = files.get("/".join(words[4:]))
            if content is None:
                return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
            of = {"ETag": hashlib.sha1(content).hexdigest(), "X-Repo-Commit": commit}
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                return self.answer(content[int(found[1]) : int(found[2]) + 1], 206, of)
            if self.command == "GET":
                self.server.read.append(words[4])
            return self.answer(content, of=of)
        if words[2:3] == ["tree"]:
            return self.answer(
                [dict(type="file", path=name, size=len(text), oid=hashlib.sha1(text).hexdigest())
                 for name, text in files.items()]
            )  # fmt: skip
        self.answer({"id": repo, "sha": commit, "siblings": [], "private": self.server.private.get(repo, False)})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            if repo in self.server.files:
                return self.answer({"error": "exists", "url": f"{self.server.url}/{repo}"}, 409)
            self.server.files[repo] = {}
            self.server.private[repo] = wanted.get("private") or wanted.get("visibility") == "private"
            return self.answer({"url": f"{self.server.url}/{repo}"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer({"files": [dict(path=n, uploadMode="regular", shouldIgnore=False) for n in names]})
        if "/commit/" in self.path:
            repo = "/".join(self.path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = self.server.commit(repo)
            url = f"{self.server.url}/{repo}/commit/{commit}"
            return self.answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
        self.answer({})  # validation of the card

    def answer(self, content, status: int = 200, of: dict[str, str] | None = None) -> None:
        is_json = not isinstance(content, bytes)
        content = json.dumps(content).encode() if is_json else content
        self.send_response(status)
        kind = {"Content-Type": "application/json"} if is_json else {}
        for name, value in (kind | {"Content-Length": str(len(content))} | (of or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The settings are those that huggingface_hub reads from the environment when it is imported."""
    with Hub() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found
        found.shutdown()
        thread.join()


def test_a_name_of_the_hub_is_a_folder_that_is_downloaded_once(server, llama_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    server.add("org/llama", llama_folder)
    server.files["org/llama"] |= {"pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"}
    config = fine_tuning("hugging_face:org/llama")
    folder = config.checkpoint.source()[0]
    assert config.run_dir == "runs/llama" and config.data.tokenizer == str(folder / "tokenizer.json")
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in llama_folder.iterdir())
    assert (folder / "model.safetensors").read_bytes() == (llama_folder / "model.safetensors").read_bytes()
    assert hub.name_of(folder) == hub.Name("org/llama", server.commit("org/llama"))
    requests = len(server.requests)
    assert str(open_source("hugging_face:org/llama")) == str(folder)
    infer.main(["generate", "--run=hugging_face:org/llama", "--prompt=hello", "--max_tokens=2", "--temperature=0"])
    assert capsys.readouterr().out.startswith("hello") and len(server.requests) == requests
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "llama").symlink_to(llama_folder)  # a folder on this machine wins
    assert hub.local("hugging_face:org/llama") == "org/llama"


def test_a_tokenizer_of_the_hub_needs_no_weights(server, llama_folder):
    from megajax.data.tokenizers.load import load_tokenizer

    server.add("org/only-tokenizer", llama_folder)
    found = load_tokenizer("hugging_face:org/only-tokenizer@v1")
    assert found.identity == load_tokenizer(str(llama_folder)).identity
    assert not any("safetensors" in request for request in server.requests)


def planned(capsys) -> list[str]:
    """The lines of a plan that are the same in each process."""
    return [line for line in capsys.readouterr().out.splitlines() if "host memory" not in line]


def test_a_plan_reads_no_weights_of_the_hub(server, llama_folder, monkeypatch, capsys):
    server.add("org/planned", llama_folder)
    server.files["org/planned"]["consolidated.safetensors"] = b"another copy"
    for plan in ("--plan", "--plan=search:2"):  # neither needs the data that a run would
        train.main([f"--config=hugging_face:{llama_folder}", plan])
        _, *wanted = planned(capsys)
        train.main(["--config=hugging_face:org/planned", plan])
        title, *found = planned(capsys)
        assert "hugging_face:org/planned" in title and found == wanted
    train.main(["--config=hugging_face:org/planned", "--help"])
    of_library = dict(megajax.plan("hugging_face:org/planned").rows)
    assert of_library["parameters"] == dict(megajax.plan(f"hugging_face:{llama_folder}").rows)["parameters"]
    (best, *_) = megajax.search(megajax.recipe(f"hugging_face:{llama_folder}"), 2)
    assert best.data.source == "indexed"  # as in the recipe, whose data is not named yet
    assert "config.json" in server.read and "model.safetensors" not in server.read
    downloaded = fine_tuning("hugging_face:org/planned").checkpoint.source()[0]  # outside of a plan
    assert (downloaded / "model.safetensors").read_bytes() == (llama_folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.without_weights():
        assert hub.local(f"hugging_face:org/planned@{downloaded.name}") == str(downloaded)


def test_what_cannot_be_downloaded_is_one_line_that_says_what_to_do(server, llama_folder, monkeypatch):
    server.add("org/known", llama_folder)
    for name, wanted in {
        "org/missing": f"nor, for this user, on {server.url}/org/missing; if it is private, set HF_TOKEN",
        "org/gated": f"access must be asked for, on {server.url}/org/gated; then set HF_TOKEN",
        "org/known@v2": f"{server.url}/org/known has no such revision",
        "some/folder/here": "neither a folder on this machine nor a name of the hub, ORG/NAME",
    }.items():
        with pytest.raises(ValueError, match=wanted) as error:
            train.main([f"--config=hugging_face:{name}", "--plan"])
        assert str(error.value).startswith(f"hugging_face:{name}: ") and "\n" not in str(error.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot be reached; .* run hf download org/known --repo-type model"):
        hub.local("hugging_face:org/known")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=r"no folder on this machine is called org/known; .*pip install 'megajax\[hub\]'"
    ):
        hub.local("hugging_face:org/known")


def test_the_settings_of_huggingface_hub_hold(server, llama_folder, tmp_path):
    server.add("org/settings", llama_folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": server.url, "HF_TOKEN": "secret"}
    environment["HF_HOME"] = str(tmp_path / "home")
    command = [sys.executable, "-c", "from megajax import hub; print(hub.local('hugging_face:org/settings@v1'))"]

    def folder(**changed: str) -> str:
        found = subprocess.run(command, env=environment | changed, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    commit = server.commit("org/settings")
    assert folder() == str(tmp_path / "home" / "hub" / "models--org--settings" / "snapshots" / commit)
    assert "Bearer secret" in server.tokens
    requests = len(server.requests)
    assert folder(HF_HUB_OFFLINE="1").endswith(commit) and len(server.requests) == requests


@pytest.fixture(scope="module")
def tuned(llama_folder, tmp_path_factory):
    """A run that began with a folder, which has a card."""
    folder = tmp_path_factory.mktemp("tuned")
    base = folder / "base"
    base.mkdir()
    for path in llama_folder.iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: community\ntags: [x]\n---\n# Base\n")
    (folder / "chat.jsonl").write_text((json.dumps({"prompt": "hello", "completion": "hello hello"}) + "\n") * 40)
    train.main([
        f"--config=hugging_face:{base}", f"--run_dir={folder / 'run'}", f"--data.paths={folder / 'chat.jsonl'}",
        f"--data.cache_dir={folder / 'cache'}", "--training.steps=2", "--training.sequence_length=32",
        "--training.log_every_steps=1", "--training.eval_every_steps=2", "--mesh.fsdp=8",
    ])  # fmt: skip
    return folder


def test_a_run_is_pushed_with_a_card_and_comes_back(server, tuned, llama_folder, monkeypatch, capsys):
    run = tuned / "run"
    push([str(run), "org/pushed", "--private", "--dtype=bfloat16"])
    assert capsys.readouterr().out.endswith(f"{run}: on {server.url}/org/pushed\n")
    assert server.private["org/pushed"] and not list(run.glob(".push*"))
    files = server.files["org/pushed"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= set(files)
    _, head, text = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers", "tags": ["megajax"], "license": "other", "license_name": "community"
    }  # fmt: skip
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in (
        "# org/pushed", "| begins with | base |", "| licence of these weights | community |",
        "| training | 2 steps of 8 sequences of 32 tokens |", "| architecture | LlamaForCausalLM |",
        f"| evaluation loss | {losses[-1]['eval_loss']:.4f} (step 2) |",
        'model = LlamaForCausalLM.from_pretrained("org/pushed")', "training.steps=2",
    ):  # fmt: skip
        assert line in text, line
    assert "| data | chat.jsonl (" in text and str(tuned) not in text  # no path of this machine
    assert open_source("hugging_face:org/pushed").config.model == open_source(llama_folder).config.model

    convert(["export", f"--run={run}", f"--to={tuned / 'out'}"])
    assert "ORG/NAME" in (tuned / "out" / "README.md").read_text()
    (tuned / "out" / "README.md").write_text("# my own card")
    push([str(tuned / "out"), "org/public"])
    assert server.files["org/public"]["README.md"] == b"# my own card" and not server.private["org/public"]
    for arguments, message in {
        (str(tuned / "out"), "org/public", "--private"): "name=org/public is public already",
        (str(tuned / "out"), "org/other", "--step=1"): "is exported already: --step, --dtype and --merge are for a run",
        (str(tuned), "org/other"): "no checkpoint in",
        (str(run), "a/b/c"): "nor a name of the hub",
    }.items():
        with pytest.raises(SystemExit):
            push(arguments)
        assert message in capsys.readouterr().err


def test_an_adapter_names_its_base_on_the_hub(server, llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.add("org/base", llama_folder)
    server.files["org/base"]["README.md"] = b"---\nlicense: mit\n---\n"
    (tmp_path / "chat.jsonl").write_text((json.dumps({"prompt": "hello", "completion": "hello hello"}) + "\n") * 40)
    train.main([
        "--config=hugging_face:org/base", "--run_dir=run", "--data.paths=chat.jsonl", "--lora.rank=2",
        "--training.steps=1", "--training.sequence_length=32", "--training.eval_every_steps=0",
    ])  # fmt: skip
    push(["run", "org/adapter"])
    options = json.loads(server.files["org/adapter"]["adapter_config.json"])
    assert options["base_model_name_or_path"] == "org/base" and options["revision"] == server.commit("org/base")
    card = server.files["org/adapter"]["README.md"].decode()
    assert "library_name: peft" in card and "base_model: org/base" in card and "license: mit" in card
    opened = open_source("hugging_face:org/adapter")
    assert opened.config.lora.rank == 2 and hub.name_of(opened.path).repo == "org/base"


SAMPLES = """
import json, sys
import megajax
data = megajax.Run(megajax.recipe("gpt_tiny", json.loads(sys.argv[1]))).datasets
print(json.dumps([data.train[i]["tokens"].tolist() for i in range(len(data.train))]))
"""


def test_a_dataset_of_the_hub_is_tokenized_once_and_then_needs_no_network(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps({"text": f"line {i} of the text", "id": i}) + "\n" for i in range(40))
    server.files["org/text"] = {"README.md": b"# text", "train.jsonl": lines.encode(), "test.jsonl": b"{}"}
    (tmp_path / "local.jsonl").write_text(lines)
    preprocess(["--input", "local.jsonl", "--output_prefix", "local"])
    fields = {"data.tokenizer": "bytes", "training.steps": 3, "training.sequence_length": 32}

    def samples(path: str, **environment: str) -> list[list[int]]:
        command = [sys.executable, "-c", SAMPLES, json.dumps(fields | {"data.paths": path})]
        found = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    data = megajax.Run(megajax.recipe("gpt_tiny", fields | {"data.paths": "local"})).datasets
    wanted = [data.train[i]["tokens"].tolist() for i in range(len(data.train))]
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
    assert samples("hugging_face:org/text", HF_HUB_OFFLINE="0", **settings) == wanted
    assert samples("hugging_face:org/text", HF_HUB_OFFLINE="1", **settings) == wanted
