"""Who is given what: rules, what holds without any, and what a mistake in one is told."""

from __future__ import annotations

import dataclasses
import grp
import os
import pwd
from pathlib import Path

import pytest

from kvsidecar.core.access import Access, Grant, Identity, Policy, Rule, parse
from kvsidecar.core.quota import Quota
from kvsidecar.daemon.setting_sources import load_settings
from kvsidecar.errors import ConfigError, LimitExceeded
from kvsidecar.support.patterns import EVERYTHING
from tests.harness import NAMESPACE

LLAMA = dataclasses.replace(NAMESPACE, model="meta-llama/Llama-3.1-8B", extra="team-a")
QWEN = dataclasses.replace(NAMESPACE, model="Qwen/Qwen3-8B")
OWNER, OTHER = 990, 1001


def access(policy: str | None, **others: object) -> Access:
    return Access(parse(policy), owner=OWNER, **others)  # type: ignore[arg-type]


def uid(number: int, *gids: int) -> Identity:
    return Identity(number, frozenset(gids))


@pytest.mark.parametrize(
    ("patterns", "llama", "qwen"),
    [
        (("meta-llama/*",), True, False),
        (("Qwen/Qwen3-8B",), False, True),
        (("Qwen/Qwen3",), False, False),
        (("qwen/*",), False, False),
        (("* team-a",), True, False),
        (("* team-b",), False, False),
        ((str(QWEN),), False, True),
        (("nothing", "Qwen/*"), False, True),
        ((EVERYTHING,), True, True),
        ((), False, False),
    ],
)
def test_a_pattern_means_the_model_or_the_whole_text_of_a_namespace(
    patterns: tuple[str, ...], llama: bool, qwen: bool
) -> None:
    grant = Grant(patterns)
    assert (grant.may_use(LLAMA), grant.may_use(QWEN)) == (llama, qwen)


def test_without_a_policy_users_of_the_host_may_use_all_and_certificates_nothing() -> None:
    everybody = access(None)
    assert everybody.grant(uid(OTHER)) == Grant((EVERYTHING,), admin=False)
    assert everybody.grant(Identity(certificate=("node",))) == Grant()


def test_a_policy_gives_nothing_to_whom_it_does_not_name_and_all_that_its_rules_say_to_others() -> None:
    ruled = access("[{uids=[1001], namespaces=['a*']}, {gids=[7], namespaces=['b*', 'a*'], admin=true}]")
    assert ruled.grant(uid(OTHER + 1)) == Grant()
    assert ruled.grant(uid(OTHER)) == Grant(("a*",))
    assert ruled.grant(uid(OTHER, 7)) == Grant(("a*", "b*"), admin=True)
    assert ruled.grant(uid(5, 7, 8)) == Grant(("b*", "a*"), admin=True)


def test_names_of_a_certificate_fit_patterns_and_never_a_uid() -> None:
    ruled = access("[{certificates=['*.ops.example'], admin=true}, {uids=[0], namespaces=['*']}]")
    assert ruled.grant(Identity(certificate=("laptop", "a.ops.example"))) == Grant((), admin=True)
    assert ruled.grant(Identity(certificate=("a.ops.example.evil",))) == Grant()
    assert ruled.grant(Identity(certificate=("0",))) == Grant()


@pytest.mark.parametrize("policy", [None, "[{uids=[1001], namespaces=['*']}]"])
def test_root_the_owner_and_the_admin_group_are_admins_with_and_without_a_policy(policy: str | None) -> None:
    ruled = access(policy, admin_gid=50)
    who = [uid(0), uid(OWNER), uid(OTHER, 50), uid(OTHER), Identity(certificate=("0",))]
    assert [ruled.grant(each).admin for each in who] == [True, True, True, False, False]
    if policy is not None:
        assert not ruled.grant(uid(0)).may_use(LLAMA), "an admin uses namespaces by rule only"


def test_who_says_nothing_is_what_the_mode_of_the_socket_proves() -> None:
    rule = "[{uids=[0], namespaces=['*']}]"
    cases = [access(None, private=True), access(None), access(rule, private=True)]
    assert [each.anonymous.grant for each in cases] == [
        Grant((EVERYTHING,), admin=True),
        Grant((EVERYTHING,), admin=False),
        Grant(),
    ]


def test_a_rule_may_name_users_and_groups(tmp_path: Path) -> None:
    user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(os.getgid())
    file = tmp_path / "kvsidecar.toml"
    file.write_text(f'[[policy]]\nuids = ["{user.pw_name}", 4]\ngids = ["{group.gr_name}"]\nnamespaces = ["*"]\n')
    settings = load_settings({"config": str(file)}, {})
    rule = Rule(frozenset({user.pw_uid, 4}), frozenset({group.gr_gid}), (), ("*",))
    assert settings.policy == Policy((rule,))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("uids = [1]", "rule 1 that grants nothing: give namespaces or admin = true"),
        ('namespaces = ["*"]', "rule 1 that matches no client: give uids, gids or certificates"),
        ('uids = ["nobody-of-that-name"]', "uids have 'nobody-of-that-name', which this machine does not know"),
        ("uids = 1", "uids is 1; it must be a list"),
        ("uids = [-1]", "uids have -1; it must be a number or a name"),
        ("uids = [true]", "uids have True; it must be a number or a name"),
        ("uids = [65534]", "the id of everyone without an id on this host"),
        ('uids = [1]\nadmin = "yes"', "admin is 'yes'; it must be true or false"),
        ('uids = [1]\nnamespaces = "*"', "namespaces is '*'; it must be a list of texts"),
        ('uids = [1]\nnamespace = ["*"]', "'namespace'; known are"),
    ],
)
def test_a_mistake_in_a_rule_is_one_sentence_that_names_file_and_rule(tmp_path: Path, table: str, said: str) -> None:
    file = tmp_path / "kvsidecar.toml"
    file.write_text(f"[[policy]]\n{table}\n")
    with pytest.raises(ConfigError) as raised:
        load_settings({"config": str(file)}, {})
    assert str(raised.value).startswith(f"policy in {file} has a rule 1 ")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no", ": Invalid value at 'no'"),
        ("[1]", " must be tables: [[policy]]"),
        ("[{uids=[1]", "Unclosed inline table at its end"),
        ("[{uids = [1], namespaces = [*]}]", ": Invalid value at '*]}]'"),
        ("[{uids = [1]},\n {uids = [2, x]}]", " at 'x]}]' of line 2"),
    ],
)
def test_a_flag_that_is_no_array_of_tables_is_refused_with_the_place(value: str, said: str) -> None:
    """Not its column in a text that the user has not written."""
    with pytest.raises(ConfigError, match=r"^--policy=.*(tables|TOML array)") as raised:
        load_settings({"policy": value}, {}, Path("no such file"))
    assert str(raised.value).endswith(said)


def test_a_quota_is_one_holders_and_what_is_refused_is_not_taken() -> None:
    quota = Quota(3, "things")
    quota.take("a", 2)
    with pytest.raises(LimitExceeded, match="3 things"):
        quota.take("a", 2)
    quota.take("a")
    quota.take("b", 3)
    quota.give_back("a", 3)
    quota.take("a", 3)
