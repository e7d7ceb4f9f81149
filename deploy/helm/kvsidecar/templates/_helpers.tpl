{{- define "kvsidecar.labels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* By these a workload knows its pods: another release in the namespace has another instance. */ -}}
{{- define "kvsidecar.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- define "kvsidecar.name" -}}
{{ .Values.fullnameOverride | default .Release.Name }}
{{- end }}

{{- define "kvsidecar.engine" -}}
{{ include "kvsidecar.name" . }}-vllm
{{- end }}

{{- /* A text or number as it was written: Helm reads numbers of files as floats, and would write 1e+06 for a million. */ -}}
{{- define "kvsidecar.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "kvsidecar.image" -}}
{{ .Values.image.repository }}:{{ include "kvsidecar.text" (.Values.image.tag | default .Chart.AppVersion) }}
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

{{- /* `amounts` as requests and limits, and what is `given` over them. */ -}}
{{- define "kvsidecar.resources" -}}
{{- range list "requests" "limits" }}
{{ . }}: {{- toYaml (mergeOverwrite (fromYaml $.amounts) (index $.given . | default dict)) | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvsidecar.daemonResources" -}}
{{- range $kind, $given := .Values.resources }}
{{- range list "memory" "hugepages-2Mi" }}
{{- if hasKey $given . }}
{{- fail (printf "resources.%s.%s: the pool is made to fit, so set pool.memory, or pool.hugePages" $kind .) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "kvsidecar.resources" (dict "amounts" (include "kvsidecar.amounts" .) "given" .Values.resources) | trim }}
{{- end }}

{{- define "kvsidecar.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "kvsidecar.name" .) }}
{{- else }}{{ .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* What all pods have in common, by the lines of a pod's spec: all run where the GPUs are. */ -}}
{{- define "kvsidecar.anyPod" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Beside it, what those with a daemon have. */ -}}
{{- define "kvsidecar.pod" -}}
{{- include "kvsidecar.anyPod" . }}
{{- with include "kvsidecar.serviceAccount" . }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
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

{{- define "kvsidecar.poolDirectories" -}}
{{- with .Values.pool }}
{{- if .hostPath }}
{{- if ne $.Values.mode "daemonset" }}{{ fail "pool.hostPath is for mode=daemonset: pods of one node would share it" }}{{ end }}
{{- if not .warmRestart }}{{ fail "pool.hostPath keeps the pool, and pool.warmRestart=false does not" }}{{ end }}
{{- if and .hugePages.enabled (not .tableHostPath) }}{{ fail "pool.hostPath with pool.hugePages needs pool.tableHostPath" }}{{ end }}
{{- include "kvsidecar.directory" (dict "root" $ "name" "pool" "path" "/pool" "mode" "0700") }}
{{- if .hugePages.enabled }}
{{ include "kvsidecar.directory" (dict "root" $ "name" "table" "path" "/table" "mode" "0700") }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvsidecar.diskDirectory" -}}
{{- if .Values.tiers.disk.size }}
{{- include "kvsidecar.directory" (dict "root" . "name" "disk" "path" "/disk" "mode" "0700") }}
{{- end }}
{{- end }}

{{- /* The daemon's variables, each once: what the chart derives, over it `settings`, over these `extraEnv`. */ -}}
{{- define "kvsidecar.environment" -}}
{{- range list "socket" "pool_dir" "table_dir" "disk_dir" "shared_dir" }}
{{- if hasKey $.Values.settings . }}
{{- fail (printf "settings.%s: the chart mounts volumes there; pool.warmRestart, pool.hugePages and tiers say which" .) }}
{{- end }}
{{- end }}
{{- $env := dict "KVSIDECAR_POOL_SIZE" .Values.pool.size }}
{{- with .Values.pool.hugePages }}
{{- if .enabled }}
{{- $env = merge (dict "KVSIDECAR_POOL_SIZE" (printf "%sB" .size) "KVSIDECAR_HUGE_PAGES" "hugetlb") $env }}
{{- end }}
{{- end }}
{{- if .Values.pool.warmRestart }}
{{- $_ := set $env "KVSIDECAR_POOL_DIR" "/pool" }}
{{- if .Values.pool.hugePages.enabled }}
{{- $_ := set $env "KVSIDECAR_TABLE_DIR" "/table" }}
{{- end }}
{{- end }}
{{- with .Values.policy }}
{{- $_ := set $env "KVSIDECAR_POLICY" . }}
{{- end }}
{{- with .Values.shares }}
{{- $_ := set $env "KVSIDECAR_SHARE" . }}
{{- end }}
{{- range $tier := list "disk" "shared" }}
{{- with (index $.Values.tiers $tier).size }}
{{- $_ := set $env (printf "KVSIDECAR_%s_DIR" (upper $tier)) (printf "/%s" $tier) }}
{{- $_ := set $env (printf "KVSIDECAR_%s_SIZE" (upper $tier)) . }}
{{- end }}
{{- end }}
{{- with .Values.tiers.cluster.master }}
{{- $_ := set $env "KVSIDECAR_CLUSTER_MASTER" . }}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- $_ := set $env (printf "KVSIDECAR_%s" (upper $name)) $value }}
{{- end }}
{{- range .Values.extraEnv }}
{{- $env = omit $env .name }}
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ include "kvsidecar.text" $value | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
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
  env: {{- include "kvsidecar.environment" . | trim | nindent 4 }}
  ports:
    - name: kvsidecar-http
      containerPort: {{ include "kvsidecar.text" (.Values.settings.http_port | default 9464) }}
  # HTTP listens after RPC does: from here on engines can attach.
  startupProbe:
    httpGet:
      path: /health
      port: kvsidecar-http
    periodSeconds: 2
    timeoutSeconds: 2
    failureThreshold: 60
  {{- if or (not $sidecar) .Values.waitForPool }}
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
    {{- include "kvsidecar.daemonResources" . | nindent 4 }}
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
{{- if .Values.pool.hostPath }}
- name: pool
  hostPath:
    path: {{ .Values.pool.hostPath }}
    type: DirectoryOrCreate
{{- if .Values.pool.hugePages.enabled }}
- name: table
  hostPath:
    path: {{ .Values.pool.tableHostPath }}
    type: DirectoryOrCreate
{{- end }}
{{- else if .Values.pool.warmRestart }}
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
  image: {{ .Values.engine.image.repository }}:{{ include "kvsidecar.text" .Values.engine.image.tag }}
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
    {{- with .Values.engine.huggingFaceToken }}
    {{- if .secret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .secret }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
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
    {{- $amounts := dict "cpu" (toString .Values.engine.cpu) "memory" .Values.engine.memory "nvidia.com/gpu" (toString .Values.engine.gpus) }}
    {{- include "kvsidecar.resources" (dict "amounts" (toYaml $amounts) "given" .Values.engine.resources) | trim | nindent 4 }}
  volumeMounts:
    # The directory, not the socket: a daemon that restarts makes a new socket.
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
  {{- toYaml (.Values.engine.modelCache | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}
