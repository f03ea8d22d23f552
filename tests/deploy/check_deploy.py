"""Checks of deploy/, each of which ends with one line, or with exit code 1 and what is wrong:
    check_deploy.py structure DEPLOY CP_ATTN    files parse, are what their kinds ask for, and agree with each other and
                                                with the options of the program
    check_deploy.py schemas DEPLOY              pods and services are valid by the schemas of Kubernetes, of the package
                                                kubernetes-validate, without which it exits with 77
    check_deploy.py metrics DEPLOY METRICS      what rules and board ask of Prometheus is in METRICS, a text of /metrics
"""
import json
import os
import re
import subprocess
import sys
import tempfile

try:
    import yaml
except ImportError:
    print("skipped: no python3-yaml")
    sys.exit(77)


def expect(holds, message):
    if not holds:
        sys.exit(f"check_deploy.py: {message}")


def documents(deploy, path):
    with open(os.path.join(deploy, path), encoding="utf-8") as file:
        return list(yaml.safe_load_all(file))


def text_of(deploy, path):
    with open(os.path.join(deploy, path), encoding="utf-8") as file:
        return file.read()


def first_match(pattern, text, what):
    match = re.search(pattern, text, re.MULTILINE)
    expect(match, f"no {what}")
    return match.group(1)


# ---- the container ----

INSTRUCTIONS = {"ARG", "FROM", "COPY", "WORKDIR", "RUN", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions(deploy):
    """The instructions of the Containerfile with what follows them, on one line each."""
    lines = [line for line in text_of(deploy, "Containerfile").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [line.split(None, 1) for line in joined.splitlines() if line.strip()]


def check_copy(root, words, stages, where):
    """What is copied is there: in the tree, or in a stage before this one, where ./quickstart package leaves packages."""
    if words[0].startswith("--from="):
        expect(words[0][7:] in stages[:-1], f"{where}: no stage {words[0][7:]} before it: {stages}")
        folder = first_match(r"they lie in (build/\S+)$", text_of(root, "quickstart"), "folder of the packages")
        expect(words[1:-1] == [f"/tree/{folder}/*.deb"], f"{where}: packages lie in /tree/{folder}, not {words[1:-1]}")
        return
    ignored = text_of(root, ".dockerignore").split()
    for name in words[:-1]:
        expect(os.path.exists(os.path.join(root, name)), f"{where}: {name} is not in the tree")
        expect(f"/{name.split('/')[0]}" not in ignored, f"{where}: {name} is left out by .dockerignore")


def check_container(deploy):
    """Its instructions follow on each other, and nobody in it is root. Its user."""
    arguments, stages, runs = set(), [], []
    last = {}
    for name, rest in instructions(deploy):
        where = f"Containerfile: {name} {rest}"
        expect(name in INSTRUCTIONS, f"{where}: expected one of {sorted(INSTRUCTIONS)}")
        expect(name == "ARG" or stages or name == "FROM", f"{where}: before any FROM")
        if name == "ARG":
            arguments.add(rest.split("=")[0])
        elif name == "FROM":
            image, *alias = rest.split()
            expect(set(re.findall(r"\$\{(\w+)\}", image)) <= arguments, f"{where}: of arguments {arguments}")
            stages.append(alias[1] if alias else "")
        elif name == "COPY":
            check_copy(os.path.join(deploy, ".."), rest.split(), stages, where)
        elif name == "RUN":
            expect(subprocess.run(["sh", "-n", "-c", rest], check=False).returncode == 0, f"{where}: no command of sh")
            runs.append(rest)
        last[name] = rest
    commands = " ".join(runs)
    uid, user = re.search(r"useradd --uid (\d+) --create-home (\w+)", commands).groups()
    expect(last["USER"] == user, f"the container runs as {last['USER']}, expected {user}")
    for package in ("python3-jinja2", "procps"):  # for chat templates, and for pkill, by which pods end their ranks
        expect(package in commands, f"the container has no {package}")
    for name in ("ENTRYPOINT", "CMD"):
        words = json.loads(last[name])
        expect(all(isinstance(word, str) for word in words), f"Containerfile: {name} is no list of texts")
    return int(uid)


# ---- pods ----


def option(words, name):
    """The value of an option of a command line: "--name=value", or "name value"."""
    for i, word in enumerate(words):
        if word == name:
            return words[i + 1]
        if word.startswith(name + "="):
            return word.split("=", 1)[1]
    return sys.exit(f"check_deploy.py: no {name} among {words}")


def check_pod(where, pod, uid):
    user = pod["securityContext"]
    expect(user["runAsNonRoot"] is True and user["runAsUser"] == uid, f"{where}: not the user {uid} of the container")
    expect(pod["enableServiceLinks"] is False, f"{where}: variables of services may be taken for settings")
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        words = container["command"] + container["args"]
        expect(all(isinstance(word, str) for word in words), f"{where}: a command of other things than texts: {words}")
        expect(container["image"] and container["resources"]["limits"], f"{where}: no image, or no limits")
        expect({mount["name"] for mount in container["volumeMounts"]} == volumes, f"{where}: mounts are not the volumes")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            action = container.get(probe, {})
            target = action.get("httpGet", action.get("tcpSocket"))
            expect(target or not action, f"{where}: {probe} asks nothing")
            expect(not target or target["port"] in ports, f"{where}: {probe} at a port that is not there")
    return pod["containers"][0]


def check_server(where, pod, uid, ranks, known):
    """The container of rank 0."""
    container = check_pod(where, pod, uid)
    words = container["command"] + container["args"]
    expect(int(option(words, "-np")) == ranks, f"{where}: {option(words, '-np')} ranks, expected {ranks}")
    limit = int(option(words, "odls_base_sigkill_timeout"))
    expect(int(option(words, "--shutdown-timeout")) < limit < pod["terminationGracePeriodSeconds"],
           f"{where}: answers have no time to finish before mpirun, or Kubernetes, ends the ranks")
    for word in container["args"][1:]:
        expect(word.split("=")[0] in known, f"{where}: cp_attn serve has no option {word}")
    expect(container["args"][0] == "serve" and option(words, "--host") == "0.0.0.0", f"{where}: probes do not reach it")
    expect(container["ports"][0]["containerPort"] == int(option(words, "--port")), f"{where}: not the port it listens at")
    paths = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    expect(paths == ["/health", "/health", "/live"], f"{where}: probes of {paths}")
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    expect(hook[:2] == ["sh", "-c"] and hook[2].startswith("pkill -TERM -x -P 1 cp_attn;") and words[0] == "mpirun",
           f"{where}: the ranks, which mpirun of process 1 has started, are not told of the end: {hook}")
    return container


def check_service(where, service, pods):
    expect(service["apiVersion"] == "v1" and service["kind"] == "Service", f"{where}: found no Service behind the job")
    selected = [pod for pod in pods if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()]
    expect(len(selected) == 1, f"{where}: the service selects {len(selected)} kinds of pods, expected that of rank 0")
    names = {port["name"] for container in selected[0]["spec"]["containers"] for port in container["ports"]}
    expect(service["spec"]["ports"][0]["targetPort"] in names, f"{where}: the service has no such port behind it")


def check_deployment(deploy, uid, known):
    where = "kubernetes/deployment.yaml"
    deployment, service = documents(deploy, where)
    expect(deployment["apiVersion"] == "apps/v1" and deployment["kind"] == "Deployment", f"{where}: no Deployment")
    spec = deployment["spec"]
    expect(spec["replicas"] == 1 and spec["strategy"]["type"] == "Recreate", f"{where}: two pods want the same GPUs")
    expect(spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"], f"{where}: it selects other pods")
    pod = spec["template"]["spec"]
    gpus = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    container = check_server(where, pod, uid, gpus, known)
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    expect(container["securityContext"]["readOnlyRootFilesystem"] and "/tmp" in writable,
           f"{where}: mpirun has no place for its session, or the file system of the container can be written")
    check_service(where, service, [spec["template"]])


def check_mpijob(deploy, uid, known):
    where = "kubernetes/mpijob.yaml"
    job, service = documents(deploy, where)
    expect(job["apiVersion"] == "kubeflow.org/v2beta1" and job["kind"] == "MPIJob", f"{where}: no MPIJob")
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    expect(launcher["replicas"] == 1 and spec["runLauncherAsWorker"], f"{where}: rank 0 is not in the launcher")
    ranks = spec["slotsPerWorker"] * (1 + worker["replicas"])
    check_server(where, launcher["template"]["spec"], uid, ranks, known)
    sshd = check_pod(where, worker["template"]["spec"], uid)
    config = text_of(deploy, "kubernetes/sshd_config")
    expect(sshd["command"][0].endswith("/sshd") and sshd["args"][-1] == "/etc/cp_attn/sshd_config",
           f"{where}: a worker runs no sshd")
    port = int(first_match(r"^Port (\d+)$", config, "port of sshd"))
    expect(sshd["ports"][0]["containerPort"] == port, f"{where}: sshd listens at {port}")
    expect(f"Port {port}" in text_of(deploy, "kubernetes/ssh_config"), f"{where}: mpirun asks at another port than {port}")
    expect(f"HostKey {spec['sshAuthMountPath']}/" in config, f"{where}: sshd looks for keys in another place")
    gpus = {pod["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
            for pod in (launcher, worker)}
    expect(gpus == {spec["slotsPerWorker"]}, f"{where}: {gpus} GPUs for {spec['slotsPerWorker']} ranks of a pod")
    check_service(where, service, [launcher["template"], worker["template"]])


def check_schemas(deploy):
    try:
        import kubernetes_validate
    except ImportError:
        print("skipped: no kubernetes-validate")
        sys.exit(77)
    found = []
    for path in ("kubernetes/deployment.yaml", "kubernetes/mpijob.yaml"):
        for document in documents(deploy, path):
            parts = [document]
            if document["kind"] == "MPIJob": # of its own schema, but for the pods
                parts = [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role.lower()},
                          "template": replica["template"]}
                         for role, replica in document["spec"]["mpiReplicaSpecs"].items()]
            for part in parts:
                try:
                    kubernetes_validate.validate(part, "1.31", strict=True)
                except kubernetes_validate.ValidationError as error:
                    sys.exit(f"check_deploy.py: {path}: {part['kind']}: {error.message}")
                found.append(part["kind"])
    print(f"valid: {', '.join(found)}")


# ---- Slurm ----


def check_sbatch(deploy, known):
    path = os.path.join(deploy, "slurm/cp_attn.sbatch")
    lines = text_of(deploy, "slurm/cp_attn.sbatch").splitlines()
    begin = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    late = [line for line in lines[begin:] if line.startswith("#SBATCH")]
    expect(not late, f"{path}: Slurm reads no directive behind the first command: {late}")
    directives = dict(line[len("#SBATCH --"):].split("=", 1) for line in lines[:begin] if line.startswith("#SBATCH"))
    expect(directives["gpus-per-task"] == "1", f"{path}: not a GPU a rank")
    with tempfile.TemporaryDirectory() as stubs:
        srun = os.path.join(stubs, "srun")
        with open(srun, "w", encoding="utf-8") as file:
            file.write('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        os.chmod(srun, 0o755)
        environment = {"PATH": f"{stubs}:{os.environ['PATH']}", "MODEL_DIR": "/models/a b"}
        words = subprocess.run(["bash", path], env=environment, check=True, capture_output=True,
                               text=True).stdout.splitlines()
        bare = subprocess.run(["bash", path], env={"PATH": environment["PATH"]}, capture_output=True, text=True)
    expect(words[:2] == ["--mpi=pmix", "--gpus-per-task=1"], f"{path}: srun {words}")
    given = [word for word in words[words.index("serve"):] if word.startswith("--")]
    expect(option(words, "--model-dir") == "/models/a b" and set(given) <= known, f"{path}: cp_attn {given}")
    expect(bare.returncode != 0 and "MODEL_DIR" in bare.stderr, f"{path}: without a model it says nothing of MODEL_DIR")


# ---- Prometheus and Grafana ----


def rules_of(deploy):
    return [rule for group in documents(deploy, "prometheus/rules.yaml")[0]["groups"] for rule in group["rules"]]


def check_rules(deploy):
    where = "prometheus/rules.yaml"
    groups = [group["name"] for group in documents(deploy, where)[0]["groups"]]
    expect(len(set(groups)) == len(groups), f"{where}: two groups of one name")
    names = []
    for rule in rules_of(deploy):
        expect(("record" in rule) != ("alert" in rule) and isinstance(rule["expr"], str), f"{where}: {rule}")
        names.append(rule.get("record") or rule["alert"])
        if "alert" in rule:
            expect(rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"],
                   f"{where}: {rule['alert']} has no severity, or no summary")
    expect(len(set(names)) == len(names), f"{where}: two rules of one name")


def board_of(deploy):
    return json.loads(text_of(deploy, "grafana/board.json"))


def check_board(deploy):
    where = "grafana/board.json"
    board = board_of(deploy)
    expect(board["uid"] and board["title"] and board["schemaVersion"] >= 36, f"{where}: no board")
    ids, taken = set(), {}
    for panel in board["panels"]:
        name, place = panel["title"], panel["gridPos"]
        expect(panel["id"] not in ids, f"{where}: {name}: another panel has its id")
        ids.add(panel["id"])
        for cell in ((x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])):
            expect(cell[0] < 24 and cell not in taken, f"{where}: {name} lies over {taken.get(cell, 'the margin')}")
            taken[cell] = name
        if panel["type"] == "row":
            continue
        references = [target["refId"] for target in panel["targets"]]
        expect(references and len(set(references)) == len(references), f"{where}: {name}: targets {references}")
        expect(panel["datasource"]["uid"] == "$datasource", f"{where}: {name}: a source of data of its own")
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$([a-z]\w*)", json.dumps(board)))
    expect(used == variables, f"{where}: uses the variables {used}, and has {variables}")


def samples_of(path):
    """The names of a text of metrics, and the labels of each."""
    samples = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            match = re.match(r"(\w+)(?:\{(.*)\})? \S+$", line)
            if match:
                labels = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', match.group(2) or "")
                samples.setdefault(match.group(1), set()).update(labels)
    return samples


def check_metrics(deploy, path):
    samples = samples_of(path)
    recorded = {rule["record"] for rule in rules_of(deploy) if "record" in rule}
    board = board_of(deploy)
    asked = [rule["expr"] for rule in rules_of(deploy)]
    asked += [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    asked += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    found = set()
    for query in asked:
        for name in re.findall(r"\bcpattn:[\w:]+", query):
            expect(name in recorded, f"{name}: no rule records it: {query}")
        names = re.findall(r"\bcpattn_\w+", query)
        expect(names or "cpattn:" in query, f"nothing of cp_attn is asked for: {query}")
        for name in names:
            expect(name in samples, f"{name}: the server does not export it: {query}")
        for name, matchers in re.findall(r"\b(cpattn_\w+)\{([^}]*)\}", query):
            for label in re.findall(r"(\w+) *[=!]", matchers):
                expect(label in samples[name], f"{name}: it has no label {label}: {query}")
        for labels in re.findall(r"\bby \(([^)]*)\)", query):
            for label in labels.split(", "):
                expect(all(label in samples[name] for name in names), f"{names}: no label {label}: {query}")
        found.update(names)
    expect(len(found) >= 20, f"only {len(found)} metrics are asked for")
    print(f"{len(found)} metrics of {len(asked)} queries are exported")


def check_structure(deploy, program):
    help_text = subprocess.run([program, "serve", "--help"], check=True, capture_output=True, text=True).stdout
    known = set(re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE))
    uid = check_container(deploy)
    check_deployment(deploy, uid, known)
    check_mpijob(deploy, uid, known)
    check_sbatch(deploy, known)
    check_rules(deploy)
    check_board(deploy)
    print("deploy/ is what its kinds ask for")


if __name__ == "__main__":
    {"structure": check_structure, "schemas": check_schemas, "metrics": check_metrics}[sys.argv[1]](*sys.argv[2:])
