"""Bringing kernels into the process: trust, digests, failing kernels, freezing, threads, forks, plans and warm-up."""

import grp
import json
import os
import pwd
import threading

import pytest
import torch
from kernel_factory import CAUSAL, Shelf, build, spec

import catalog
from catalog import serving, trust
from generator.canonical import digest_bytes
from verifier.fork_lock import ForkLock

pytestmark = pytest.mark.usefixtures("fresh_loader")

SDPA = "scaled_dot_product_attention"
X = torch.randn(1, 4, 30, 16, generator=torch.Generator().manual_seed(1))


def torchs(x=X, **more):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, **more)


def serve(shelf, **settings):
    catalog.configure(catalog=shelf.source(), **{"probe": "off", **settings})


def test_a_real_catalog_serves(tmp_path):
    shelf = Shelf()
    kernel = shelf.add(spec())
    catalog.configure(catalog=str(shelf.save(tmp_path / "catalog")), probe="off")
    torch.testing.assert_close(catalog.scaled_dot_product_attention(X, X, X), torchs())
    assert catalog.last_decision().kernel_id == kernel
    assert catalog.collect_env()["catalog"] == str(tmp_path / "catalog")


def test_the_default_folder_may_be_missing_and_a_named_one_may_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().reasons[0].code == "no_catalog"
    shelf = Shelf()
    kernel = shelf.add(spec())
    shelf.save(tmp_path / "kernel-farm" / "catalog")
    catalog.configure(probe="off")
    assert catalog.explain(SDPA, X, X, X).kernel_id == kernel
    monkeypatch.setenv("FARM_CATALOG", str(tmp_path / "elsewhere"))
    catalog.configure()
    with pytest.raises(catalog.CatalogError, match="there is no catalog at .*elsewhere"):
        catalog.scaled_dot_product_attention(X, X, X)


@pytest.mark.parametrize(("inside", "mode"), [("", 0o777), ("artifacts", 0o777), ("rows", 0o757)])
def test_a_catalog_that_others_can_write_does_not_serve(tmp_path, inside, mode):
    shelf = Shelf()
    kernel = shelf.add(spec())
    folder = shelf.save(tmp_path / "catalog")
    (folder / inside).chmod(mode)
    catalog.configure(catalog=folder, probe="off")
    told = catalog.explain(SDPA, X, X, X)
    assert told.reasons[0].code == "location" and "chmod -R go-w" in str(told)
    catalog.configure(allow_host_code=True)
    assert catalog.explain(SDPA, X, X, X).kernel_id == kernel


def test_a_group_may_write_where_it_has_no_other_member(tmp_path, monkeypatch):
    folder = tmp_path / "mine" / "catalog"
    folder.mkdir(parents=True)
    me, gid = pwd.getpwuid(os.geteuid()), folder.stat().st_gid
    users, members = [me], []
    monkeypatch.setattr(trust.pwd, "getpwall", lambda: users)
    monkeypatch.setattr(trust.grp, "getgrgid", lambda gid: grp.struct_group(("farmers", "x", gid, members)))
    for listed, others, fine in (([], [], True), ([me.pw_name], [], True), (["mallory"], [], False), ([], [gid], False)):
        trust._is_private_group.cache_clear()
        members[:] = listed
        users[1:] = [pwd.struct_passwd(("mallory", "x", 4711, g, "", "/", "/bin/sh")) for g in others]
        for inside in (folder, folder.parent):
            inside.chmod(0o775)
            told = trust.host_code_problem(folder, "uri")
            assert (told == "") is fine, told
            assert fine or ("other members of group farmers" in told and f"chmod {'-R ' * (inside == folder)}go-w" in told)
            folder.chmod(0o755)
        folder.parent.chmod(0o755)
    trust._is_private_group.cache_clear()


def test_where_a_folder_lies_counts_too(tmp_path):
    folder = tmp_path / "shared" / "catalog"
    folder.mkdir(parents=True)
    assert trust.host_code_problem(folder, "uri") == ""
    folder.parent.chmod(0o777)
    assert "which holds the catalog, can be written by other users" in trust.host_code_problem(folder, "uri")
    folder.parent.chmod(0o1777)
    assert trust.host_code_problem(folder, "uri") == ""
    assert "not a local folder" in trust.host_code_problem(None, "s3://bucket/catalog")
    os.symlink(folder.parent, tmp_path / "link")
    folder.parent.chmod(0o777)
    assert trust.host_code_problem(tmp_path / "link" / "catalog", "uri")


def test_a_changed_binary_is_refused(tmp_path):
    shelf = Shelf()
    kernel = shelf.add(spec())
    folder = shelf.save(tmp_path / "catalog")
    (name,) = shelf.binaries
    path = catalog.open(folder).artifacts.local_path(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    catalog.configure(catalog=folder, probe="off")
    assert torch.equal(catalog.scaled_dot_product_attention(X, X, X), torchs())
    told = catalog.last_decision()
    assert told.reasons[0].code == "quarantined" and "digest" in str(told) and catalog.stats()["errors"] == {"quarantined": 1}
    assert catalog.loaded_kernels()[0]["kernel_id"] == kernel and "digest" in catalog.loaded_kernels()[0]["quarantined"]


def test_swapped_binaries_are_refused():
    shelf = Shelf()
    shelf.add(spec())
    other, _ = build(spec(seqlen_q=8, seqlen_k=8, heads=1, kv_heads=1, masks=CAUSAL))
    shelf.binaries = dict.fromkeys(shelf.binaries, other)
    serve(shelf)
    catalog.scaled_dot_product_attention(X, X, X)
    assert "the bytes have" in str(catalog.last_decision()) and digest_bytes(other) in str(catalog.last_decision())


def test_what_was_hashed_is_what_runs(tmp_path):
    """The file is replaced by another kernel right after it was read: the verified bytes still load."""
    shelf = Shelf()
    shelf.add(spec())
    wrong, _ = build(spec(seqlen_q=8, seqlen_k=8, heads=1, kv_heads=1), "wrong")
    (name,) = shelf.binaries
    path = tmp_path / name
    path.write_bytes(shelf.binaries[name])

    def read(asked):
        data = path.read_bytes()
        path.write_bytes(wrong)
        return data

    shelf.read = read
    serve(shelf)
    torch.testing.assert_close(catalog.scaled_dot_product_attention(X, X, X), torchs())
    assert catalog.last_decision().kernel_id


def test_nothing_on_the_way_to_a_first_call_uses_the_network(tmp_path, monkeypatch):
    shelf = Shelf()
    kernel = shelf.add(spec())
    catalog.configure(catalog=shelf.save(tmp_path / "catalog"))  # with the golden case in a child
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(f"socket.socket.{name}", lambda *a: pytest.fail("network"))
    monkeypatch.setattr("socket.getaddrinfo", lambda *a, **k: pytest.fail("network"))
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().kernel_id == kernel and catalog.loaded_kernels()[0]["probed"]


def test_no_artifact_is_a_miss_with_the_next_kernel_tried():
    shelf = Shelf()
    gone, there = shelf.add(spec(), mark="gone", ours_s=1e-5), shelf.add(spec(), mark="there")
    whole = shelf.binaries
    shelf.binaries = {name: data for name, data in shelf.binaries.items() if not name.startswith(gone)}

    def read(name):
        if name not in shelf.binaries:
            raise catalog.CatalogError(f"artifact {name}: not in memory")
        return shelf.binaries[name]

    shelf.read = read
    serve(shelf)
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().kernel_id == there and "not in memory" in str(catalog.last_decision())
    shelf.read = lambda name: whole[name]
    catalog.reload()  # asks again: the storage may have been away for a moment
    catalog.configure(catalog=shelf.source())
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().kernel_id == gone and not catalog.stats()["errors"]


def test_a_kernel_without_memory_leaves_the_call_to_torch():
    shelf = Shelf()
    shelf.add(spec(), fault="no_memory")
    serve(shelf)
    for _ in range(2):
        assert torch.equal(catalog.scaled_dot_product_attention(X, X, X), torchs())
    assert catalog.stats()["outcomes"] == {"miss:launch_failed": 2} and not catalog.stats()["errors"]


def test_a_broken_kernel_is_put_away_and_others_keep_working():
    shelf = Shelf()
    broken, sound = shelf.add(spec(), fault="broken", ours_s=1e-5), shelf.add(spec())
    serve(shelf)
    assert torch.equal(catalog.scaled_dot_product_attention(X, X, X), torchs())
    catalog.scaled_dot_product_attention(X, X, X)
    assert catalog.last_decision().kernel_id == sound
    assert catalog.stats()["outcomes"] == {"miss:launch_failed": 1, f"hit:{sound}": 1}
    assert [k["quarantined"][:13] for k in catalog.loaded_kernels() if k["kernel_id"] == broken] == ["launch_failed"]


def test_on_error_raise_names_the_kernel():
    shelf = Shelf()
    shelf.add(spec(), fault="broken")
    serve(shelf, on_error="raise")
    with pytest.raises(catalog.NoKernelError, match="test_attention: returned 7"):
        catalog.scaled_dot_product_attention(X, X, X)


def test_after_freeze_nothing_is_loaded():
    shelf = Shelf()
    warm, cold = shelf.add(spec(), mark="warm", ours_s=5e-4), shelf.add(spec(masks=CAUSAL))
    shelf.add(spec(), mark="faster, cold", ours_s=1e-5, buckets=[(64, 64)])
    serve(shelf)
    catalog.scaled_dot_product_attention(X, X, X)
    catalog.freeze()
    assert torch.equal(catalog.scaled_dot_product_attention(X, X, X, is_causal=True), torchs(is_causal=True))
    told = catalog.last_decision()
    assert told.reasons[0].code == "frozen" and cold in str(told)
    longer = torch.randn(1, 4, 31, 16)
    catalog.scaled_dot_product_attention(longer, longer, longer)
    assert catalog.last_decision().kernel_id == warm
    assert catalog.stats()["loads"] == 1 and catalog.stats()["frozen"]


def test_sixteen_threads_make_the_first_call():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    start, results = threading.Barrier(16), []

    def first():
        start.wait()
        results.append((catalog.scaled_dot_product_attention(X, X, X), catalog.last_decision().kernel_id))

    threads = [threading.Thread(target=first) for _ in range(16)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(results) == 16 and all(torch.equal(out, results[0][0]) and ran == kernel for out, ran in results)
    assert shelf.reads == 1 and catalog.stats()["outcomes"] == {f"hit:{kernel}": 16}


def test_threads_share_a_kernel_and_keep_their_own_arguments():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    faults = []

    def work(seed):
        x = torch.randn(1, 4, 20 + seed % 3, 16, generator=torch.Generator().manual_seed(seed))
        expected = torchs(x)
        for _ in range(50):
            if not torch.allclose(catalog.scaled_dot_product_attention(x, x, x), expected, rtol=1e-4, atol=1e-5):
                faults.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not faults and catalog.stats()["outcomes"] == {f"hit:{kernel}": 400}


def in_a_fork(work):
    """The JSON that `work` gives in a forked child; fails when it does not end within ten seconds."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    import select

    ready, _, _ = select.select([reads], [], [], 10)
    answer = os.read(reads, 1 << 16) if ready else b""
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    os.close(reads)
    assert answer, "the child did not answer"
    return json.loads(answer)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_serves_too():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    expected = catalog.scaled_dot_product_attention(X, X, X)

    def work():
        serving.outcomes.clear()
        out = catalog.scaled_dot_product_attention(X, X, X)
        return [bool(torch.equal(out, expected)), catalog.stats()["outcomes"]]

    assert in_a_fork(work) == [True, {f"hit:{kernel}": 1}]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_holds_the_locks():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    inside, leave = threading.Event(), threading.Event()
    read = shelf.read

    def slow(name):
        inside.set()
        leave.wait(60)
        return read(name)

    shelf.read = slow
    catalog.configure(catalog=shelf.source())
    thread = threading.Thread(target=lambda: catalog.scaled_dot_product_attention(X, X, X))
    thread.start()
    assert inside.wait(60)

    def work():
        leave.set()
        catalog.scaled_dot_product_attention(X, X, X)
        return catalog.last_decision().kernel_id

    try:
        assert in_a_fork(work) == kernel
    finally:
        leave.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_inside_of_a_lock_and_beside_one():
    lock, inside, leave = ForkLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            inside.set()
            leave.wait(60)

    def take():
        with lock:
            return True

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    try:
        assert in_a_fork(take)
    finally:
        leave.set()
        thread.join()
    with lock:
        assert in_a_fork(take)
    assert take()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_plan_of_the_parent_runs_in_a_forked_child():
    """OpenMP's threads, which ran the kernel in the parent, are none in the child."""
    shelf = Shelf()
    shelf.add(spec())
    serve(shelf)
    given = [X, X.clone(), X.clone()]
    plan = catalog.plan(catalog.scaled_dot_product_attention, *given)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = plan.run(*given)
        assert plan.kernel and in_a_fork(lambda: bool(torch.equal(plan.run(*given), expected)))
    finally:
        torch.set_num_threads(threads)


def test_plans():
    shelf = Shelf()
    kernel = shelf.add(spec(masks=CAUSAL))
    serve(shelf)
    x = X.transpose(1, 2).contiguous().transpose(1, 2)
    plan = catalog.plan(catalog.scaled_dot_product_attention, x, x, x, is_causal=True)
    assert plan.kernel == kernel and plan.reasons == () and plan.envelope == ("32 x 32",)
    out = torch.empty_like(x)
    assert plan.run(x, x, x, out=out) is out
    torch.testing.assert_close(out, torchs(x, is_causal=True))
    torch.testing.assert_close(plan.run(x, x, x), out, rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"shape of q: expected .*30, 16.*, found .*29, 16.*make another plan"):
        plan.run(x[:, :, :29], x, x)
    with pytest.raises(ValueError, match="dtype of k: expected torch.float32, found torch.float64"):
        plan.run(x, x.double(), x)
    with pytest.raises(ValueError, match="out: expected strides"):
        plan.run(x, x, x, out=torch.empty(1, 4, 30, 16))
    assert plan.run(x.clone().requires_grad_(), x, x).grad_fn is not None


def test_a_plan_outlives_the_catalog_it_was_made_from():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    plan = catalog.plan(SDPA, X, X, X)
    catalog.configure(catalog=Shelf().source())
    torch.testing.assert_close(plan.run(X, X, X), torchs())
    assert plan.kernel == kernel and catalog.plan(SDPA, X, X, X).kernel is None
    torch.testing.assert_close(catalog.plan(SDPA, X, X, X).run(X, X, X), torchs())


def test_plans_of_the_other_family():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    x = X.transpose(1, 2)
    plan = catalog.plan(catalog.flash_attn_func, x, x, x, softmax_scale=0.5)
    assert plan.kernel == kernel
    torch.testing.assert_close(plan.run(x, x, x), catalog.flash_attn_func(x, x, x, softmax_scale=0.5), rtol=0, atol=0)


def test_warm_up(tmp_path):
    shelf = Shelf()
    first, second = shelf.add(spec()), shelf.add(spec(masks=CAUSAL))
    serve(shelf)
    log = tmp_path / "specs.jsonl"
    log.write_text(spec().to_json() + "\n\n" + spec(dim=64).to_json() + "\n")
    warmed = catalog.warmup(f"log:{log}")
    assert [w.kernel_id for w in warmed] == [first, None] and warmed[1].reasons[0].code == "no_kernel"
    assert [w.kernel_id for w in catalog.warmup("catalog")] == sorted([first, second])
    assert catalog.stats()["loads"] == 2 and catalog.stats()["calls"] == 0
    log.write_text("{}\n[1]\n")
    with pytest.raises(ValueError, match="specs.jsonl:1: expected the JSON of a spec"):
        catalog.warmup(f"log:{log}")
    for wrong in ("catalogue", [5], None, 5):
        with pytest.raises(ValueError, match='warmup: expected specs, "catalog" or "log:FILE", found'):
            catalog.warmup(wrong)
    with pytest.raises(ValueError, match="warmup: .*cannot be read"):
        catalog.warmup(f"log:{tmp_path}/none")


def test_what_there_is():
    shelf = Shelf()
    kernel = shelf.add(spec())
    serve(shelf)
    assert catalog.has_kernel(spec(seqlen_q=20)) and not catalog.has_kernel(spec(masks=CAUSAL))
    assert catalog.get_kernel_variants(spec()).considered[0].kernel_id == kernel
    assert catalog.loaded_kernels() == ()
    json.dumps(catalog.collect_env())


def test_a_plan_whose_kernel_broke_does_not_call_it_again():
    shelf = Shelf()
    shelf.add(spec(), fault="broken")
    serve(shelf)
    given = [X, X.clone(), X.clone()]
    plan = catalog.plan(SDPA, *given)
    with pytest.raises(catalog.NoKernelError, match="launch_failed"):
        plan.run(*given)
    torch.testing.assert_close(plan.run(*given), torch.nn.functional.scaled_dot_product_attention(*given))
    assert catalog.last_decision().kernel_id is None and "launch_failed" in catalog.loaded_kernels()[0]["quarantined"]
