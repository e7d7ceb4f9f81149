{{- define "kvsidecar.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvsidecar.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "kvsidecar.memory" -}}
{{- if .Values.pool.hugePages.enabled }}{{ .Values.pool.hugePages.memory }}
{{- else if .Values.pool.memory }}{{ .Values.pool.memory }}
{{- else if eq .Values.mode "sidecar" }}64Gi
{{- else }}256Gi
{{- end }}
{{- end }}

{{- define "kvsidecar.amounts" -}}
cpu: {{ .Values.pool.cpu | quote }}
memory: {{ include "kvsidecar.memory" . }}
{{- if .Values.pool.hugePages.enabled }}
hugepages-2Mi: {{ .Values.pool.hugePages.size }}
{{- end }}
{{- end }}

{{- /* What the daemon's pods have in common, by the lines of a pod's spec. */ -}}
{{- define "kvsidecar.pod" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.hostPID }}
hostPID: true
{{- end }}
{{- with .Values.gpus.resourceClaims }}
resourceClaims: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvsidecar.annotations" -}}
{{- with .Values.gpus.cdi }}
cdi.k8s.io/kvsidecar: {{ . }}
{{- end }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* An init container that gives a directory to the daemon's user: kubelet makes one on the host for root alone, and fsGroup does
not reach into it. */ -}}
{{- define "kvsidecar.directory" -}}
- name: {{ .name }}-directory
  image: {{ include "kvsidecar.image" .root }}
  command: [install, --directory, --owner=10001, --group=10001, --mode={{ .mode }}, {{ .path }}]
  resources:
    requests:
      cpu: "1"
      memory: 64Mi
    limits:
      cpu: "1"
      memory: 64Mi
  securityContext:
    runAsUser: 0
    runAsGroup: 0
    readOnlyRootFilesystem: true
    allowPrivilegeEscalation: false
    capabilities:
      drop: [ALL]
      # FOWNER: install sets the mode after the owner, when the directory is no longer root's.
      add: [CHOWN, FOWNER]
  volumeMounts:
    - name: {{ .name }}
      mountPath: {{ .path }}
{{- end }}

{{- define "kvsidecar.diskDirectory" -}}
{{- if .Values.tiers.disk.size }}
{{- include "kvsidecar.directory" (dict "root" . "name" "disk" "path" "/disk" "mode" "0700") }}
{{- end }}
{{- end }}

{{- /* The daemon's container: the same in both modes, but for what a native sidecar has beside. */ -}}
{{- define "kvsidecar.container" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
- name: kvsidecar
  image: {{ include "kvsidecar.image" . }}
  {{- with .Values.image.pullPolicy }}
  imagePullPolicy: {{ . }}
  {{- end }}
  {{- if $sidecar }}
  restartPolicy: Always
  {{- end }}
  env:
    - name: KVSIDECAR_POOL_SIZE
      value: {{ ternary (printf "%sB" .Values.pool.hugePages.size) .Values.pool.size .Values.pool.hugePages.enabled | quote }}
    {{- range $name, $value := .Values.settings }}
    - name: KVSIDECAR_{{ upper $name }}
      value: {{ $value | quote }}
    {{- end }}
    {{- if .Values.pool.hugePages.enabled }}
    - name: KVSIDECAR_HUGE_PAGES
      value: hugetlb
    {{- end }}
    {{- if .Values.pool.warmRestart }}
    - name: KVSIDECAR_POOL_DIR
      value: /pool
    {{- if .Values.pool.hugePages.enabled }}
    - name: KVSIDECAR_TABLE_DIR
      value: /table
    {{- end }}
    {{- end }}
    {{- with .Values.policy }}
    - name: KVSIDECAR_POLICY
      value: {{ . | quote }}
    {{- end }}
    {{- with .Values.shares }}
    - name: KVSIDECAR_SHARE
      value: {{ . | quote }}
    {{- end }}
    {{- if .Values.tiers.disk.size }}
    - name: KVSIDECAR_DISK_DIR
      value: /disk
    - name: KVSIDECAR_DISK_SIZE
      value: {{ .Values.tiers.disk.size | quote }}
    {{- end }}
    {{- if .Values.tiers.shared.size }}
    - name: KVSIDECAR_SHARED_DIR
      value: /shared
    - name: KVSIDECAR_SHARED_SIZE
      value: {{ .Values.tiers.shared.size | quote }}
    {{- end }}
    {{- with .Values.tiers.cluster.master }}
    - name: KVSIDECAR_CLUSTER_MASTER
      value: {{ . | quote }}
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - name: kvsidecar-http
      containerPort: 9464
  # HTTP listens after RPC does: from here on engines can attach.
  startupProbe:
    httpGet:
      path: /health
      port: kvsidecar-http
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 60
  {{- if not (and $sidecar .Values.serveWithoutPool) }}
  # Ready: the pool is pinned.
  readinessProbe:
    httpGet:
      path: /ready
      port: kvsidecar-http
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 1
  {{- end }}
  # Alive: the event loop makes progress. Never because of a slow pin: a restart interrupts all engines.
  livenessProbe:
    httpGet:
      path: /health
      port: kvsidecar-http
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  resources:
    # Requests equal limits: the pod is Guaranteed, and the pool is not what the kernel kills first.
    requests: {{- include "kvsidecar.amounts" . | nindent 6 }}
    limits: {{- include "kvsidecar.amounts" . | nindent 6 }}
    {{- with .Values.gpus.resourceClaims }}
    claims:
      {{- range . }}
      - name: {{ .name }}
      {{- end }}
    {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    readOnlyRootFilesystem: true
    allowPrivilegeEscalation: false
    capabilities:
      drop: [ALL]
      {{- if eq .Values.podSecurity "privileged" }}
      # Lets the default seccomp profile pass mbind, which puts the pool on the GPUs' NUMA nodes.
      add: [SYS_NICE]
      {{- end }}
  volumeMounts:
    - name: socket
      mountPath: /run/kvsidecar
    {{- if $sidecar }}
    - name: shm
      mountPath: /dev/shm
    {{- end }}
    {{- if .Values.pool.warmRestart }}
    - name: pool
      mountPath: /pool
    {{- if .Values.pool.hugePages.enabled }}
    - name: table
      mountPath: /table
    {{- end }}
    {{- end }}
    {{- if .Values.tiers.disk.size }}
    - name: disk
      mountPath: /disk
    {{- end }}
    {{- if .Values.tiers.shared.size }}
    - name: shared
      mountPath: /shared
    {{- end }}
    - name: {{ ternary "daemon-tmp" "tmp" $sidecar }}
      mountPath: /tmp
{{- end }}

{{- define "kvsidecar.volumes" -}}
{{- if .Values.pool.warmRestart }}
# For the pool and its table. Not more than the memory limit: it is the same memory.
- name: pool
  emptyDir:
    {{- if .Values.pool.hugePages.enabled }}
    medium: HugePages
    {{- else }}
    medium: Memory
    sizeLimit: {{ include "kvsidecar.memory" . }}
    {{- end }}
{{- if .Values.pool.hugePages.enabled }}
- name: table
  emptyDir:
    medium: Memory
    sizeLimit: 8Gi
{{- end }}
{{- end }}
{{- if .Values.tiers.disk.size }}
- name: disk
  {{- if not .Values.tiers.disk.volume }}{{ fail "tiers.disk.size needs tiers.disk.volume" }}{{ end }}
  {{- toYaml .Values.tiers.disk.volume | nindent 2 }}
{{- end }}
{{- if .Values.tiers.shared.size }}
- name: shared
  {{- if not .Values.tiers.shared.volume }}{{ fail "tiers.shared.size needs tiers.shared.volume" }}{{ end }}
  {{- toYaml .Values.tiers.shared.volume | nindent 2 }}
{{- end }}
- name: {{ ternary "daemon-tmp" "tmp" (eq .Values.mode "sidecar") }}
  emptyDir:
    sizeLimit: 64Mi
{{- end }}

{{- define "kvsidecar.vllm" -}}
- name: vllm
  image: {{ .Values.engine.image.repository }}:{{ .Values.engine.image.tag }}
  command:
    - vllm
    - serve
    - {{ .Values.engine.model | quote }}
    - --kv-transfer-config
    - '{"kv_connector": "KVSidecarConnector", "kv_connector_module_path": "kvsidecar.integrations.vllm", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute"}'
    {{- range .Values.engine.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: KVSIDECAR_SOCKET
      value: /run/kvsidecar/kvsidecar.sock
    # Of models and compiled graphs, whatever the home of the image's user.
    - name: XDG_CACHE_HOME
      value: /var/cache/vllm
    # The seed of block hashes: without it replicas and restarted engines find nothing.
    - name: PYTHONHASHSEED
      value: "0"
  ports:
    - name: http
      containerPort: 8000
  startupProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    failureThreshold: 180
  readinessProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 5
  resources:
    requests: &amounts
      cpu: {{ .Values.engine.cpu | quote }}
      memory: {{ .Values.engine.memory }}
      nvidia.com/gpu: {{ .Values.engine.gpus | quote }}
    limits: *amounts
  volumeMounts:
    # The directory, not the socket: a daemon that starts anew makes a new socket.
    - name: socket
      mountPath: /run/kvsidecar
      readOnly: true
    - name: shm
      mountPath: /dev/shm
    - name: model-cache
      mountPath: /var/cache/vllm
{{- end }}

{{- define "kvsidecar.vllmVolumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: 8Gi
- name: model-cache
  emptyDir: {}
{{- end }}
