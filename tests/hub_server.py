"""A small Hugging Face Hub on this machine, for the real huggingface_hub client.

It answers the client's requests for models with Git LFS uploads (``HF_HUB_DISABLE_XET=1``), keeps
files on disk and checks sizes and hashes. Unlike on the Hub, a model and a data set cannot have the
same name.

    folder/objects/SHA256         contents of LFS files
    folder/blobs/SHA1             contents of other files, by their hash in git
    folder/repositories.json      kind, owner, branches, commits
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass
class Repository:
    """A repository.

    Its branches and pull requests name commits, and a commit holds all files of a revision.
    """

    kind: str
    private: bool
    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_commit(
        self, revision: str, parent: str | None, message: str, files: dict[str, Any]
    ) -> str:
        content = json.dumps([parent, message, files, len(self.commits)])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = {"parent": parent, "message": message, "files": files}
        self.revisions[revision] = sha
        return sha


@dataclass
class Faults:
    """Errors that the server makes on purpose.

    Attributes:
        answers: for each step, the statuses to answer instead, one for each request.
        cuts: number of uploads whose connection is closed halfway.
        silent: steps that are never answered.
        quota: bytes of LFS files that fit.
    """

    answers: dict[str, list[int]] = field(default_factory=dict)
    cuts: int = 0
    silent: tuple[str, ...] = ()
    quota: float = float("inf")


class Refused(Exception):
    """An error that the client gets as an answer."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubServer(ThreadingHTTPServer):
    """The server.

    Args:
        folder: where files are kept.

    Attributes:
        tokens: user and role of each token.
        repositories: repositories by ``user/name``.
        faults: errors to make.
        requests: (method, path, headers) of all requests.
    """

    daemon_threads = True

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        # Another host for the client, like the Hub's.
        self.storage_url = f"http://localhost:{self.server_port}/storage"
        self.lock = threading.Lock()
        for name in ("objects", "blobs"):
            (folder / name).mkdir(parents=True)
        self.tokens: dict[str, tuple[str, str]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all repositories, faults and requests."""
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        for file in [*self.folder.glob("objects/*"), *self.folder.glob("blobs/*")]:
            file.unlink()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away."""

    def create(self, repo_id: str, kind: str = "model", private: bool = False) -> Repository:
        """Make a repository with the Hub's first commit."""
        repository = self.repositories[repo_id] = Repository(kind, private)
        repository.add_commit(
            "main",
            None,
            "initial commit",
            {".gitattributes": self.keep_blob(b"*.safetensors lfs\n")},
        )
        self.save()
        return repository

    def save(self) -> None:
        content = {name: asdict(repository) for name, repository in self.repositories.items()}
        (self.folder / "repositories.json").write_text(json.dumps(content))

    def keep_blob(self, content: bytes) -> dict[str, Any]:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        (self.folder / "blobs" / oid).write_bytes(content)
        return {"lfs": False, "oid": oid, "size": len(content)}

    def path(self, file: dict[str, Any]) -> Path:
        return self.folder / ("objects" if file["lfs"] else "blobs") / file["oid"]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Contents of a revision."""
        repository = self.repositories[repo_id]
        commit = repository.commits[repository.revisions[revision]]
        return {name: self.path(file).read_bytes() for name, file in commit["files"].items()}

    def messages(self, repo_id: str, revision: str = "main") -> list[str]:
        """Messages of the commits of a revision, newest first."""
        repository, messages = self.repositories[repo_id], []
        sha = repository.revisions[revision]
        while sha is not None:
            messages.append(repository.commits[sha]["message"])
            sha = repository.commits[sha]["parent"]
        return messages


@contextmanager
def hub_server(folder: Path) -> Iterator[HubServer]:
    """Run a server within a block."""
    server = HubServer(folder)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """A connection, with a method for each step of the protocol."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two packets, of which the second would wait 40 ms
    server: HubServer

    REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
    STEPS = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", r"/api/repos/create", "create"),
        ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", "model_info"),
        ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", rf"/api/models/{REPO}/refs", "refs"),
        ("POST", rf"/api/models/{REPO}/branch/(?P<branch>[^/]+)", "branch"),
        ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("POST", rf"/{REPO}\.git/info/lfs/objects/verify", "lfs_verify"),
        ("PUT", r"/storage/(?P<oid>[0-9a-f]{64})", "upload"),
        ("GET", r"/storage/(?P<oid>[0-9a-f]{64})", "download"),
        ("GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", "resolve"),
    )

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        self.body: bytes | None = None
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        try:
            for method, pattern, step in self.STEPS:
                match = re.fullmatch(pattern, url.path)
                if match and method == self.command.replace("HEAD", "GET"):
                    self.run_step(
                        step,
                        {name: unquote(part) for name, part in match.groupdict().items() if part},
                    )
                    return
            raise Refused(404, f"There is nothing at {url.path}.")
        except Refused as refused:
            self.read_body()
            headers = {"X-Error-Message": refused.message}
            if refused.code:
                headers["X-Error-Code"] = refused.code
            self.answer({"error": refused.message}, refused.status, headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def run_step(self, step: str, arguments: dict[str, str]) -> None:
        statuses = self.server.faults.answers.get(step)
        if statuses:
            raise Refused(statuses.pop(0), "Internal error, as ordered.")
        if step in self.server.faults.silent:
            self.read_body()
            self.rfile.read(1)  # until the client goes away
            self.close_connection = True
            return
        if step == "upload" and self.server.faults.cuts:
            self.server.faults.cuts -= 1
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self.close_connection = True
            self.connection.close()
            return
        with self.server.lock:
            getattr(self, step)(**arguments)

    def read_body(self) -> bytes:
        if self.body is None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                self.body = b"".join(chunks)
            else:
                self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return self.body

    def read_json(self) -> Any:
        return json.loads(self.read_body())

    def answer(
        self, content: Any = None, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "application/octet-stream" if content is data else "application/json"
        )
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # --- who may do what

    def user(self) -> tuple[str, str] | None:
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None
        try:
            return self.server.tokens[authorization.removeprefix("Bearer ")]
        except KeyError:
            raise Refused(401, "Invalid credentials in Authorization header") from None

    def repository(self, repo: str, write: bool = False) -> Repository:
        found, user = self.server.repositories.get(repo), self.user()
        if (
            found is None
            or found.kind != "model"
            or (found.private and (user is None or user[0] != repo.split("/")[0]))
        ):
            raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write:
            self.require_write(repo)
        return found

    def require_write(self, repo: str) -> None:
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        if user != (repo.split("/")[0], "write"):
            raise Refused(403, f"You don't have the rights to write to {repo}")

    def commit_of(self, repository: Repository, revision: str) -> str:
        sha = repository.revisions.get(revision, revision)
        if sha not in repository.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    # --- steps

    def whoami(self) -> None:
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        token = {"displayName": "test", "role": user[1]}
        self.answer({"type": "user", "name": user[0], "orgs": [], "auth": {"accessToken": token}})

    def validate_yaml(self) -> None:
        content = self.read_json()["content"]
        match = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            metadata = yaml.safe_load(match[1]) if match else {}
        except yaml.YAMLError as error:
            self.answer({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        errors = []
        if metadata.get("license", "other") not in ("apache-2.0", "mit", "cc-by-nc-4.0", "other"):
            found = metadata["license"]
            errors.append({"message": f'"license" must be one of [apache-2.0, ...], got {found}'})
        for entry in metadata.get("model-index", []):
            for result in entry["results"]:
                if not {"type", "name"} <= result["dataset"].keys() or "type" not in result["task"]:
                    errors.append(
                        {"message": '"model-index[0].results[0]" lacks a task or dataset'}
                    )
        self.answer({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create(self) -> None:
        wanted = self.read_json()
        user = self.user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        repo = f"{wanted['organization'] or user[0]}/{wanted['name']}"
        if user != (repo.split("/")[0], "write"):
            raise Refused(
                403,
                "You don't have the rights to create a model under the namespace "
                f"{repo.split('/')[0]}",
            )
        if repo in self.server.repositories:
            raise Refused(
                409, f"You already created this {self.server.repositories[repo].kind} repo"
            )
        private = wanted.get("visibility") == "private" or wanted.get("private", False)
        self.server.create(repo, wanted.get("type", "model"), private)
        self.answer({"url": f"{self.server.url}/{repo}", "name": repo})

    def model_info(self, repo: str, revision: str = "main") -> None:
        repository = self.repository(repo)
        sha = self.commit_of(repository, revision)
        siblings = [{"rfilename": name} for name in repository.commits[sha]["files"]]
        self.answer(
            {
                "id": repo,
                "modelId": repo,
                "private": repository.private,
                "sha": sha,
                "siblings": siblings,
            }
        )

    def tree(self, repo: str, revision: str) -> None:
        repository = self.repository(repo)
        files = repository.commits[self.commit_of(repository, revision)]["files"]
        entries = []
        for name, file in files.items():
            lfs = (
                {"lfs": {"oid": file["oid"], "size": file["size"], "pointerSize": 130}}
                if file["lfs"]
                else {}
            )
            entries.append(
                {"type": "file", "path": name, "oid": file["oid"], "size": file["size"], **lfs}
            )
        self.answer(entries)

    def refs(self, repo: str) -> None:
        revisions = self.repository(repo).revisions
        branches = [
            {"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha}
            for n, sha in revisions.items()
        ]
        self.answer({"branches": branches, "converts": [], "tags": []})

    def branch(self, repo: str, branch: str) -> None:
        repository = self.repository(repo, write=True)
        start = self.read_json().get("startingPoint", "main")
        if branch.startswith("refs/"):
            raise Refused(400, f"Invalid reference for a branch: {branch}")
        if branch in repository.revisions:
            raise Refused(409, f"Reference already exists: {branch}")
        repository.revisions[branch] = self.commit_of(repository, start)
        self.server.save()
        self.answer({})

    def preupload(self, repo: str, revision: str) -> None:
        repository = self.repository(repo, write="create_pr" not in self.query)
        present = repository.commits[self.commit_of(repository, revision)]["files"]
        files = []
        for file in self.read_json()["files"]:
            mode = (
                "lfs"
                if file["path"].endswith(".safetensors") or file["size"] > 10 * 2**20
                else "regular"
            )
            base64.b64decode(file["sample"], validate=True)
            oid = {"oid": present[file["path"]]["oid"]} if file["path"] in present else {}
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        self.answer({"files": files})

    def lfs_batch(self, repo: str) -> None:
        self.repository(repo)
        wanted = self.read_json()
        assert (wanted["operation"], wanted["hash_algo"]) == ("upload", "sha256")
        stored = sum(file.stat().st_size for file in (self.server.folder / "objects").iterdir())
        if stored + sum(entry["size"] for entry in wanted["objects"]) > self.server.faults.quota:
            raise Refused(
                403, "Private repository storage limit reached, please upgrade your plan."
            )
        objects = []
        for entry in wanted["objects"]:
            actions = {}
            if not (self.server.folder / "objects" / entry["oid"]).exists():
                upload = {"href": f"{self.server.storage_url}/{entry['oid']}?signature=valid"}
                verify = {"href": f"{self.server.url}/{repo}.git/info/lfs/objects/verify"}
                actions = {"actions": {"upload": upload, "verify": verify}}
            objects.append({**entry, **actions})
        self.answer({"transfer": "basic", "objects": objects})

    def require_signature(self) -> None:
        if self.query.get("signature") != ["valid"] or "Authorization" in self.headers:
            raise Refused(400, "Only one auth mechanism allowed: the signature in the URL")

    def upload(self, oid: str) -> None:
        self.require_signature()
        content = self.read_body()
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "The content's hash is another")
        (self.server.folder / "objects" / oid).write_bytes(content)
        self.answer(b"")

    def lfs_verify(self, repo: str) -> None:
        self.repository(repo)
        wanted = self.read_json()
        stored = self.server.folder / "objects" / wanted["oid"]
        if not stored.exists() or stored.stat().st_size != wanted["size"]:
            raise Refused(404, "Object not found or of another size")
        self.answer({"message": "Object verified."})

    def commit(self, repo: str, revision: str) -> None:
        create_pr = "create_pr" in self.query
        repository = self.repository(repo, write=not create_pr)
        if self.headers["Content-Type"] != "application/x-ndjson":
            raise Refused(415, "A commit is sent as application/x-ndjson")
        header, *operations = [json.loads(line) for line in self.read_body().splitlines()]
        parent = self.commit_of(repository, revision)
        files = dict(repository.commits[parent]["files"])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = self.server.keep_blob(base64.b64decode(value["content"]))
            elif operation["key"] == "lfsFile":
                stored = self.server.folder / "objects" / value["oid"]
                if not stored.exists() or stored.stat().st_size != value["size"]:
                    raise Refused(
                        400, f"{value['path']} points to an LFS object that was not uploaded"
                    )
                files[value["path"]] = {"lfs": True, "oid": value["oid"], "size": value["size"]}
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, f"Unknown operation {operation['key']}")
        answer = {}
        if create_pr:
            number = sum(name.startswith("refs/pr/") for name in repository.revisions) + 1
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.url}/{repo}/discussions/{number}"
        sha = repository.add_commit(revision, parent, header["value"]["summary"], files)
        self.server.save()
        self.answer(
            {"commitUrl": f"{self.server.url}/{repo}/commit/{sha}", "commitOid": sha, **answer}
        )

    def resolve(self, repo: str, revision: str, file: str) -> None:
        repository = self.repository(repo)
        sha = self.commit_of(repository, revision)
        found = repository.commits[sha]["files"].get(file)
        if found is None:
            raise Refused(404, f"Entry not found: {file}", "EntryNotFound")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{found["oid"]}"'}
        if found["lfs"]:
            linked = {"X-Linked-Etag": f'"{found["oid"]}"', "X-Linked-Size": str(found["size"])}
            self.answer(
                b"",
                302,
                {
                    **headers,
                    **linked,
                    "Location": f"{self.server.storage_url}/{found['oid']}?signature=valid",
                },
            )
        else:
            self.answer(self.server.path(found).read_bytes(), 200, headers)

    def download(self, oid: str) -> None:
        self.require_signature()
        self.answer((self.server.folder / "objects" / oid).read_bytes(), 200, {"ETag": f'"{oid}"'})
