"""Runs the container of a Deployment on this machine, without a cluster, as a kubelet would: its command, its probes,
and its end, with an answer under way.

    python3 docs/guide/examples/pod_here.py deploy/kubernetes/deployment.yaml WORD=VALUE...

A word of the command line gets another value: "-np=2", "--port=8000", "cp_attn=./cp_attn" for the program itself.
"""
import atexit
import http.client
import json
import re
import subprocess
import sys
import threading
import time

import yaml

with open(sys.argv[1], encoding="utf-8") as file:
    deployment = next(document for document in yaml.safe_load_all(file) if document["kind"] == "Deployment")
pod = deployment["spec"]["template"]["spec"]
container = pod["containers"][0]

changes = dict(argument.split("=", 1) for argument in sys.argv[2:])
words = []
for word in container["command"] + container["args"]:
    name, *value = word.split("=", 1)  # "--name=value"
    if words and words[-1] in changes and words[-1].startswith("-"):  # "-name value"
        words.append(changes[words[-1]])
    elif name in changes and value:
        words.append(f"{name}={changes[name]}")
    elif word in changes and not word.startswith("-"):
        words.append(changes[word])
    else:
        words.append(word)
port = int(next(word.split("=")[1] for word in words if word.startswith("--port=")))


def ask(path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=pod["terminationGracePeriodSeconds"])
    connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
    answer = connection.getresponse()
    return answer.status, answer.read()


def probe(name):
    """The last code of a probe, which is tried as often as it may fail."""
    spec = container[name]
    code = None
    for _ in range(spec.get("failureThreshold", 3)):
        try:
            code, _ = ask(spec["httpGet"]["path"])
        except OSError:
            code = None  # nobody listens
        if code == 200:
            break
        if process.poll() is not None:
            sys.exit(f"pod_here.py: the container ended with exit code {process.returncode} before {name} was answered")
        time.sleep(spec["periodSeconds"] / 10)
    print(f"{name}: {code} from {spec['httpGet']['path']}", flush=True)


def finish(result):
    code, text = ask("/v1/completions", {"prompt": [7, 8, 9], "max_tokens": 50, "ignore_eos": True})
    tokens = json.loads(text)["usage"]["completion_tokens"] if code == 200 else text.decode()
    result.append(f"the answer under way: {code}, {tokens} tokens")


process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
atexit.register(process.terminate)  # whatever goes wrong here
for name in ("startupProbe", "readinessProbe", "livenessProbe"):
    probe(name)

under_way = []
client = threading.Thread(target=finish, args=(under_way,))
client.start()
while client.is_alive() and not re.search(rb"^cpattn_num_requests_running\{.*\} 1$", ask("/metrics")[1], re.M):
    time.sleep(0.01)
if not client.is_alive():
    sys.exit("pod_here.py: the answer was there before the end began")

grace = pod["terminationGracePeriodSeconds"]
end = time.monotonic() + grace
hook = container["lifecycle"]["preStop"]["exec"]["command"]
# In the pod mpirun is process 1.
subprocess.run([word.replace("-P 1 ", f"-P {process.pid} ") for word in hook], check=True)
process.terminate()
client.join()
print(*under_way)
try:
    code = process.wait(end - time.monotonic())
except subprocess.TimeoutExpired:
    process.kill()
    sys.exit(f"pod_here.py: after {grace} s it has not ended")
print(f"exit code {code}, within the {grace} s that the pod has")
sys.exit(code)
