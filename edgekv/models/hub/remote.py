"""A repository on Hugging Face's server, or on the one that HF_ENDPOINT names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgekv.errors import BadInput

HOST = "https://huggingface.co"
MISSING = "a download needs the package huggingface_hub: pip install 'edgekv[hub]'"


@dataclass(frozen=True)
class RemoteFile:
    """A file in a repository of Hugging Face's.

    url: where it is fetched; etag: SHA-256 of its bytes, or its number in git, in hex.
    """

    name: str
    url: str
    etag: str
    size: int


class Repository:
    """One repository at its newest commit. files: the names of what is in it.

    Raises BadInput, one line, if it cannot be asked.
    """

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.endpoint = (os.environ.get("HF_ENDPOINT") or HOST).rstrip("/")
        with _in_one_line(self.repo, self.endpoint):
            import huggingface_hub

            api = huggingface_hub.HfApi(endpoint=self.endpoint)
            info = api.model_info(repo, timeout=30)
            self.commit = str(info.sha)
            self.files = [one.rfilename for one in info.siblings or []]

    def file(self, name: str) -> RemoteFile:
        """What the server says about a file."""
        import huggingface_hub as hub

        url = hub.hf_hub_url(self.repo, name, revision=self.commit, endpoint=self.endpoint)
        with _in_one_line(self.repo, self.endpoint):
            about = hub.get_hf_file_metadata(url, timeout=30)
        if not about.etag or about.size is None:
            raise BadInput(f"{self.endpoint} says no checksum or size of {name}: take another one")
        return RemoteFile(name, url, about.etag, about.size)

    def headers(self) -> dict[str, str]:
        """What a request carries: the user's token, if there is one."""
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(library_name="edgekv"))

    @contextmanager
    def in_one_line(self) -> Iterator[None]:
        """Turns whatever goes wrong with the server into a BadInput."""
        with _in_one_line(self.repo, self.endpoint):
            yield


@contextmanager
def _in_one_line(repo: str, endpoint: str) -> Iterator[None]:
    try:
        from huggingface_hub import errors
    except ImportError:
        raise BadInput(MISSING) from None
    network: Any = getattr(errors, "HTTPError", OSError)  # of the HTTP library that it uses
    try:
        yield
    except errors.GatedRepoError:
        raise BadInput(
            f"{repo} asks you to agree to its terms: do so at {endpoint}/{repo}, then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            f"{endpoint} shows no repository {repo}: check the name; for a private one set HF_TOKEN"
        ) from None
    except errors.HfHubHTTPError as error:
        code = getattr(error.response, "status_code", "no")
        raise BadInput(
            f"{endpoint} answers with status {code} about {repo}: try again later"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise BadInput(f"downloads are off (HF_HUB_OFFLINE), and {repo} is not here") from None
    except (network, OSError) as error:
        why = " ".join(str(error).split())[:120] or type(error).__name__
        raise BadInput(
            f"{endpoint} cannot be reached ({why}): the same command goes on where it stopped"
        ) from None
