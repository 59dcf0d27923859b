"""Which models of an unmodified script are found, and what counts as a step of theirs."""

from __future__ import annotations

import pytest

from loka_toolkit.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("untouched")


def test_evaluation_between_steps_and_a_dry_forward_are_no_steps(run):
    ran = run(
        """
        model = mlp()
        loss_of(model(batch())).backward()  # nobody trains it yet
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # no gradients: changes nothing
        for step in range(3):
            loss_of(model(batch())).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(batch(5))
            model.eval()
            model(batch(6))  # carelessly, with gradients
            model.train()
        """
    )
    # The step before anything was called with an optimizer counts too, and is the one not seen.
    assert (
        ran.summary.models[0].notes and "first step was not seen" in ran.summary.models[0].notes[0]
    )
    assert ran.steps() == 3
    steps = ran.trace().errors.to_pandas().groupby("step").site.unique()
    assert all({"0#0:wgrad", "2#0:dgrad"} <= set(sites) for sites in steps)
    rows = ran.trace().sites.to_pandas().query("role == 'fwd'").m
    assert set(rows) == {24}, "the careless evaluation took no step's place"


def test_alternating_models_are_told_apart_and_the_generator_takes_no_step_of_the_critic(run):
    ran = run(
        """
        def main():
            generator, critic = mlp(5, 13), mlp(13, 1)
            g = torch.optim.Adam(generator.parameters(), lr=1e-3)
            c = torch.optim.Adam(critic.parameters(), lr=1e-3)
            for step in range(6):
                c.zero_grad()
                fake = generator(batch(24, 5))
                loss_of(critic(batch(24, 13))).backward()
                loss_of(-critic(fake.detach())).backward()
                c.step()
                if step % 2:
                    g.zero_grad()
                    loss_of(critic(generator(batch(16, 5)))).backward()
                    g.step()
            return generator, critic
        main()
        """
    )
    assert sorted(model.name for model in ran.summary.models) == ["critic", "generator"]
    assert not (ran.out / "manifest.json").exists()
    assert ran.steps("critic") == 6
    assert ran.steps("generator") == 3
    critic = ran.trace("critic").sites.to_pandas()
    # Only what the critic's own optimizer used: its real batch of 24, never the generator's 16.
    assert set(critic.query("role == 'fwd'").m) == {24}
    assert ran.roles("critic") == {"0": {"fwd", "wgrad"}, "2": {"fwd", "dgrad", "wgrad"}}
    generator = ran.trace("generator").errors.to_pandas()
    assert set(ran.roles("generator")["2"]) == {"fwd", "dgrad", "wgrad"}
    assert set(generator.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_critic_that_is_frozen_for_its_generator_is_found_when_it_thaws(run):
    ran = run(
        """
        generator, critic = mlp(5, 13), mlp(13, 1)
        g = torch.optim.Adam(generator.parameters(), lr=1e-3)
        c = torch.optim.Adam(critic.parameters(), lr=1e-3)
        for step in range(3):
            critic.requires_grad_(False)
            g.zero_grad()
            loss_of(critic(generator(batch(16, 5)))).backward()
            g.step()
            critic.requires_grad_(True)
            c.zero_grad()
            loss_of(critic(batch(24, 13))).backward()
            c.step()
        """
    )
    assert ran.steps("critic") == ran.steps("generator") == 3
    critic = ran.trace("critic").sites.to_pandas()
    assert set(critic.query("role == 'fwd'").m) == {24}
    errors = ran.trace("critic").errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_frozen_encoder_in_evaluation_mode_belongs_to_the_step_of_its_head(run):
    ran = run(
        """
        encoder, head = mlp(13, 5).eval(), nn.Linear(5, 1)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(head(encoder(batch()))).backward()
            optimizer.step()
        """
    )
    sites = ran.trace().errors.to_pandas().groupby("step").site.unique()
    assert len(sites) == 2
    assert all({"encoder.0#0:fwd", "head#0:fwd"} <= set(found) for found in sites)


def test_only_the_model_asked_for(run):
    text = """
        a, b = mlp(), mlp(5)
        first = torch.optim.SGD(a.parameters(), lr=0.1)
        second = torch.optim.SGD(b.parameters(), lr=0.1)
        for step in range(2):
            loss_of(a(batch())).backward(); first.step(); first.zero_grad()
            loss_of(b(batch(24, 5))).backward(); second.step(); second.zero_grad()
        """
    ran = run(text, model="b")
    assert ran.steps() == 2
    assert set(ran.trace().sites.to_pandas().query("fqn == '0' and role == 'fwd'").k) == {5}
    assert ran.trace().steps["gemm_flops_unseen"].to_pylist() == [0.0, 0.0]
    notes = {model.name: model.notes for model in ran.summary.models}
    assert "--model b" in notes["a"][0]
    with pytest.raises(ConfigurationError, match=r"unknown model 'c'.*'a'|known: a, b"):
        run(text, model="c", force=True)


def test_two_optimizers_of_one_model_make_one_step_per_round(run):
    ran = run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(50, 8, sparse=True)
                self.dense = mlp(8)
            def forward(self, i):
                return self.dense(self.table(i))
        net = Net()
        sparse = torch.optim.SparseAdam(net.table.parameters())
        dense = torch.optim.Adam(net.dense.parameters())
        for step in range(6):
            loss_of(net(torch.randint(50, (24,)))).backward()
            dense.step()
            if step % 3 == 0:  # the other one steps now and then
                sparse.step()
            sparse.zero_grad(); dense.zero_grad()
        """
    )
    assert [model.name for model in ran.summary.models] == ["net"]
    assert ran.steps() == 6
    assert ran.trace().steps["status"].to_pylist() == ["recorded"] * 6


def test_modules_of_one_optimizer_are_one_model_under_their_names(run):
    ran = run(
        """
        encoder, head = mlp(13, 5), nn.Linear(5, 1)
        optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(head(encoder(batch()))).backward()
            optimizer.step()
        """
    )
    assert ran.steps() == 2
    assert ran.roles() == {
        "encoder.0": {"fwd", "wgrad"},
        "encoder.2": {"fwd", "dgrad", "wgrad"},
        "head": {"fwd", "dgrad", "wgrad"},
    }
    assert set(ran.trace().steps["gemm_flops_unseen"].to_pylist()) == {0.0}


def test_a_model_that_is_called_by_its_forward_method_only(run):
    ran = run(
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.weight = mlp(13, 5), nn.Parameter(torch.randn(5, 1))
            def forward(self, x):
                return self.body(x) @ self.weight
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(net.forward(batch())).backward()
            optimizer.step()
        """
    )
    assert [model.type for model in ran.summary.models] == ["Net"]
    assert set(ran.roles()) == {"body.0", "body.2", "(root)"}
    assert ran.steps() == 2


@pytest.mark.parametrize("fused", [False, True])  # fused ones are called even to skip
def test_a_gradient_scaler_skips_no_step_into_the_count(run, fused):
    ran = run(
        f"fused = {fused}\n"
        """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    optimizer.zero_grad()
    loss = model(batch(24 + step)).exp().log().square().mean()  # of no known kind
    if step == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
    )
    assert ran.steps() == 3
    assert ran.trace().steps["loss_scale"].to_pylist() == [1024.0, 512.0, 512.0]
    errors = ran.trace().errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}
    # The skipped step's forward, of 25 rows, is dropped with its gradients.
    assert 25 not in set(ran.trace().sites.to_pandas().query("role == 'fwd'").m)


def test_closures_wrappers_and_inherited_steps_count_once(run):
    ran = run(
        """
        class Wrapped(torch.optim.SGD):
            def step(self, closure=None):
                return super().step(closure)
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # hooks SGD.step as well
        model, other = mlp(), mlp(5)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
        wrapped = Wrapped(other.parameters(), lr=0.1)
        x, y = batch(), batch(24, 5)
        def closure():
            lbfgs.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            return loss
        for step in range(2):
            lbfgs.step(closure)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(other(y)).backward()
            wrapped.step()
        """
    )
    assert {m.name: m.trace.steps_seen for m in ran.summary.models} == {"model": 2, "other": 3}


def test_optimizers_that_step_inside_of_backward(run):
    ran = run(
        """
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        def step(p):
            optimizers[p].step()
            optimizers[p].zero_grad()
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(model(batch())).backward()
        """
    )
    assert ran.steps() == 3
    errors = ran.trace().errors.to_pandas()
    assert set(errors.query("site == '0#0:wgrad'").step) == {0, 1, 2}


def test_a_compiled_model_and_one_whose_training_step_is_compiled(run):
    ran = run(
        """
        model, other = mlp(), mlp(5)
        fast = torch.compile(model, backend="eager")
        @torch.compile(backend="eager")
        def loss_of_other(x):
            return loss_of(other(x))
        first = torch.optim.SGD(model.parameters(), lr=0.1)
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        for step in range(3):
            first.zero_grad(); second.zero_grad()
            loss_of(fast(batch())).backward()
            first.step()
            loss_of_other(batch(24, 5)).backward()
            second.step()
        torch.compiler.reset()
        """
    )
    found = {model.name: model for model in ran.summary.models}
    assert ran.steps("fast") == 3
    assert "compiled-model" in ran.events("fast")
    assert found["fast"].notes == ()
    assert ran.steps("other") in (2, 3)
    if ran.steps("other") == 2:
        assert "first step was not seen" in found["other"].notes[0]
