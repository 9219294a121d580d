"""A small Hub on loopback, for the real huggingface_hub client: repositories with branches and commits, uploads as git
blobs and through LFS, downloads, tokens, and faults on demand. Nothing of it is written to a disk.

```python
with HubStandIn(users={"hf_token": "ada"}) as hub:
    ...  # a process with HF_ENDPOINT=hub.url and HF_HUB_DISABLE_XET=1
    hub.files("ada/drafter")  # {path: content} of its main branch
```
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """Commits by branch, newest last."""

    branches: dict[str, list[Commit]] = field(default_factory=dict)
    private: bool = False

    def commit(self, branch: str, message: str, files: dict[str, bytes]) -> Commit:
        history = self.branches.setdefault(branch, [])
        seed = f"{branch}{len(history)}{message}{sorted((k, hashlib.sha1(v).hexdigest()) for k, v in files.items())}"
        history.append(Commit(hashlib.sha1(seed.encode()).hexdigest(), message, files))
        return history[-1]

    def find(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for history in self.branches.values() for c in history if c.oid == revision), None)


class Fault(Exception):
    """An answer other than success."""

    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class HubStandIn:
    """
    Args:
        users (`dict[str, str]`): User names by token; each may write in the namespace of his name.

    Attributes:
        repositories (`dict[str, Repository]`): by id.
        requests (`list[tuple[str, str, int]]`): method, path and status of every answer.
        faults (`list[tuple[str, str, int]]`):
            Methods, parts of paths and statuses; each is the answer to the next request that fits, once.
        unknown (`list[str]`): What was asked for and is not served here.
    """

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.faults: list[tuple[str, str, int]] = []
        self.unknown: list[str] = []
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubStandIn":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return self.repositories[repo_id].find(revision).files

    def commits(self, repo_id: str, branch: str = "main") -> list[str]:
        """Messages of what was pushed, without the commit that a new repository begins with."""
        return [commit.message for commit in self.repositories[repo_id].branches[branch][1:]]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self):
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        with self.hub.lock:
            try:
                status, headers, content = self._route(path, body)
            except Fault as fault:
                headers = {"X-Error-Code": fault.code, "X-Error-Message": fault.message}
                status, headers = fault.status, {name: value for name, value in headers.items() if value}
                content = json.dumps({"error": fault.message}).encode()
            self.hub.requests.append((self.command, path, status))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "X-Request-Id": "stand-in", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _route(self, path: str, body: bytes) -> tuple[int, dict, bytes]:
        for fault in self.hub.faults:
            if fault[0] == self.command and fault[1] in path:
                self.hub.faults.remove(fault)
                raise Fault(fault[2], message="a fault on demand")
        for method, pattern, serve in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                answer = serve(self, body, **found.groupdict())
                if isinstance(answer, tuple):
                    return answer
                return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        self.hub.unknown.append(f"{self.command} {path}")
        raise Fault(404, message="not served by the stand-in")

    # -- who asks ----------------------------------------------------------------------------------------------------

    def _user(self) -> str | None:
        sent = self.headers.get("Authorization", "")
        if not sent:
            return None
        user = self.hub.users.get(sent.removeprefix("Bearer "))
        if user is None:
            raise Fault(401, message="Invalid credentials in Authorization header")
        return user

    def _writer(self, namespace: str | None) -> str:
        user = self._user()
        if user is None:
            raise Fault(401, message="Invalid username or password.")
        if namespace not in (None, user):
            raise Fault(403, message=f"You don't have the rights to write in the namespace {namespace}")
        return user

    def _repository(self, repo: str, write: bool = False) -> Repository:
        found = self.hub.repositories.get(repo)
        if write:
            self._writer(repo.split("/")[0])
        hidden = found is not None and found.private and self._user() != repo.split("/")[0]
        if found is None or hidden:
            raise Fault(404 if self._user() else 401, "RepoNotFound", "Repository not found")
        return found

    def _commit(self, repo: str, revision: str) -> Commit:
        found = self._repository(repo).find(revision)
        if found is None:
            raise Fault(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    # -- what is served ----------------------------------------------------------------------------------------------

    def whoami(self, body):
        return {"type": "user", "name": self._writer(None), "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    def create(self, body):
        asked = json.loads(body)
        user = self._writer(asked.get("organization"))
        repo_id = f"{user}/{asked['name']}"
        if repo_id in self.hub.repositories:
            content = json.dumps({"url": f"{self.hub.url}/{repo_id}", "error": "You already created this model repo"})
            return 409, {"Content-Type": "application/json"}, content.encode()
        repository = Repository(private=asked.get("private") or asked.get("visibility") == "private")
        repository.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        self.hub.repositories[repo_id] = repository
        return {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}

    def branch(self, body, repo, name):
        repository = self._repository(repo, write=True)
        if name in repository.branches:
            raise Fault(409, message="Reference already exists")
        repository.branches[name] = list(repository.branches["main"])
        return {}

    def info(self, body, repo, revision="main"):
        commit = self._commit(repo, revision)
        siblings = [{"rfilename": name} for name in commit.files]
        return {"id": repo, "modelId": repo, "sha": commit.oid, "private": False, "tags": [], "siblings": siblings}

    def tree(self, body, repo, revision, folder=""):
        found = self._commit(repo, revision).files
        inside = {n: content for n, content in found.items() if not folder or n.startswith(f"{folder}/")}
        if folder and not inside:
            raise Fault(404, "EntryNotFound", f"{folder} does not exist")
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for name, content in inside.items():
            rest = name[len(folder) + 1 :] if folder else name
            if "/" in rest and not recursive:
                name = f"{folder}/{rest.split('/')[0]}".lstrip("/")
                entries[name] = {"type": "directory", "path": name, "oid": hashlib.sha1(name.encode()).hexdigest()}
            else:
                entries[name] = self._entry(name, content)
        return list(entries.values())

    def paths_info(self, body, repo, revision):
        files = self._commit(repo, revision).files
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(body)["paths"]
        else:
            paths = parse_qs(body.decode()).get("paths", [])
        return [self._entry(path, files[path]) for path in paths if path in files]

    def _entry(self, name: str, content: bytes) -> dict:
        entry = {"type": "file", "path": name, "size": len(content), "oid": _git_oid(content)}
        if _is_large(name):
            digest = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
        return entry

    def validate_yaml(self, body):
        head = json.loads(body)["content"].split("---")[1]
        errors = [] if ":" in head else [{"message": "The metadata is empty"}]
        return {"errors": errors, "warnings": []}

    def preupload(self, body, repo, revision):
        self._repository(repo, write=True)
        files = self._commit(repo, revision).files
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": self._remote_oid(files.get(file["path"]), file["path"]),
                }
                for file in json.loads(body)["files"]
            ]
        }

    def _remote_oid(self, content: bytes | None, name: str) -> str | None:
        if content is None:
            return None
        return hashlib.sha256(content).hexdigest() if _is_large(name) else _git_oid(content)

    def lfs_batch(self, body, repo):
        self._repository(repo, write=True)
        objects = []
        for wanted in json.loads(body)["objects"]:
            one = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.large:
                one["actions"] = {
                    "upload": {"href": f"{self.hub.url}/{repo}/lfs/{wanted['oid']}", "header": {}},
                    "verify": {"href": f"{self.hub.url}/{repo}.git/info/lfs/verify", "header": {}},
                }
            objects.append(one)
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, body, repo, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise Fault(400, message="The content does not have that hash")
        self.hub.large[oid] = body
        return 200, {}, b""

    def lfs_verify(self, body, repo):
        self._repository(repo, write=True)
        asked = json.loads(body)
        if len(self.hub.large.get(asked["oid"], b"")) != asked["size"]:
            raise Fault(404, message="The object is not there")
        return {}

    def commit(self, body, repo, revision):
        repository = self._repository(repo, write=True)
        files, message = dict(self._commit(repo, revision).files), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Fault(400, message=f"The stand-in knows no {item['key']}")
        oid = repository.commit(revision, message, files).oid
        return {
            "success": True,
            "commitOid": oid,
            "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}",
            "hookOutput": "",
        }

    def resolve(self, body, repo, revision, name):
        commit = self._commit(repo, revision)
        content = commit.files.get(name)
        if content is None:
            raise Fault(404, "EntryNotFound", f"{name} does not exist")
        headers = {
            "X-Repo-Commit": commit.oid,
            "ETag": f'"{self._remote_oid(content, name)}"',
            "Accept-Ranges": "bytes",
        }
        if _is_large(name):
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if start:
            first, last = int(start[1]), int(start[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return 206, headers, content[first : last + 1]
        return 200, headers, content


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


_REPO = r"(?P<repo>[^/]+/[^/]+?)"
_REVISION = r"(?P<revision>[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<name>[^/]+)", _Handler.branch),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", _Handler.commit),
    ("POST", rf"/api/models/{_REPO}/paths-info/{_REVISION}", _Handler.paths_info),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", _Handler.tree),
    ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", _Handler.lfs_verify),
    ("PUT", rf"/{_REPO}/lfs/(?P<oid>[0-9a-f]{{64}})", _Handler.lfs_put),
    ("GET HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<name>.+)", _Handler.resolve),
]
