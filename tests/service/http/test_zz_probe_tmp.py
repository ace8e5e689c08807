import json
from tests.audit.test_onnx_classifier import SETTINGS as S, save
from tests.service.http.conftest import Service, png, zip_of
from tests.service.http.test_transport import multipart, part, SETTINGS
from tests.service.http.test_archives_sent import dataset
from tests.service.http import test_archives_sent as T
def test_probe(service, tmp_path):
    model = save(tmp_path/"m.onnx").read_bytes()
    forms = {"/v1/explain/upload": ("image", png(), part("settings", SETTINGS)),
      "/v1/classifiers/upload": ("file", model, part("settings", json.dumps(S).encode())),
      "/v1/datasets/upload": ("file", zip_of(dataset()), part("name", b"faces"))}
    out = []
    for a,(f,c,rest) in forms.items():
        for n in ["a.png","../../etc/passwd", "../b.png", "a/b.png", "..\\b.png", "..", "a\0b.png", "n" * 300, "a\x1b.png", ""]:
            r = service.client.post(a, **multipart(part(f,c,n), rest)); out.append((a,n[:20],r.status_code,r.text[:160]))
        for u in (b"http://127.0.0.1:9/a.png", b"file:///etc/passwd"):
            r = service.client.post(a, **multipart(part(f,u), rest)); out.append((a,u,"field",r.status_code,r.text[:160]))
            r = service.client.post(a, **multipart(part(f,u,"a.png"), rest)); out.append((a,u,"file",r.status_code,r.text[:160]))
    marks = T.test_a_bad_archive_is_refused_whole.pytestmark[0].args[1] if T.test_a_bad_archive_is_refused_whole.pytestmark[0].name=="parametrize" else T.test_a_bad_archive_is_refused_whole.pytestmark[1].args[1]
    import warnings; warnings.simplefilter("ignore")
    for m in marks:
        r = service.client.post(T.UPLOAD, files={"file": ("a.zip", m())}); out.append((r.status_code,r.text[:130]))
    for m in T.test_a_data_set_that_cannot_be_used_is_refused.pytestmark[0].args[1]:
        r = service.client.post(T.UPLOAD, files={"file": ("a.zip", zip_of(m))}); out.append((r.status_code,r.text[:230]))
    for i in ["%2e%2e", "x", "0" * 31, "0" * 33, "A" * 32, "..%2f..%2fetc"]:
      for address in (f"/v1/audits/{i}", f"/v1/audits/{i}/report.html", f"/v1/cfkd/{i}/dataset.zip", f"/v1/gate/{i}"):
        r = service.client.get(address); out.append((address,r.status_code,r.text[:130]))
      r = service.client.delete(f"/v1/classifiers/{i}"); out.append((i,r.status_code,r.text[:130]))
    open("/tmp/gaps/out","w").write("\n".join(map(str,out)))
