{{/*
A Deployment with one container, its PodDisruptionBudget, and the ConfigMap that it mounts at /etc/kvevents/config:

  root        the chart's context
  component   name of the container, and of the block of values
  args, mounts, volumes   of the container
  port        name and number of the port, which answers probes
  scheme      of the probes
  config      text of CONFIG.toml
  surge       pods that a rollout starts before it ends old ones; 0: it ends one first
  grace       seconds for the end of the pod
*/}}
{{- define "kvevents.workload" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .component -}}
{{- $selector := include "kvevents.selector" . -}}
{{- $name := ternary (include "kvevents.fullname" $root) (printf "%s-%s" (include "kvevents.fullname" $root) .component) (eq .component "serve") -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $name }}
  labels: {{- include "kvevents.labels" . | nindent 4 }}
data:
  {{ .component }}.toml: |
    {{- .config | nindent 4 }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "kvevents.labels" . | nindent 4 }}
spec:
  replicas: {{ $values.replicas }}
  {{- if eq $root.Values.mode "plane" }}
  progressDeadlineSeconds: 3600  # a replica of a large plane reads for minutes before it is ready
  {{- end }}
  selector:
    matchLabels: {{- $selector | nindent 6 }}
  strategy:
    type: RollingUpdate
    rollingUpdate: {maxSurge: {{ .surge }}, maxUnavailable: {{ sub 1 .surge }}}
  template:
    metadata:
      labels: {{- include "kvevents.labels" . | nindent 8 }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        checksum/config: {{ .config | sha256sum }}
        {{- with $values.podAnnotations }}{{ toYaml . | nindent 8 }}{{ end }}
    spec:
      serviceAccountName: {{ include "kvevents.serviceAccount" $root }}
      {{- /* Its token finds engines. */}}
      automountServiceAccountToken: {{ eq .component (include "kvevents.follower" $root) }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      terminationGracePeriodSeconds: {{ .grace }}
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      {{- with $values.topologySpreadConstraints }}
      topologySpreadConstraints:
        {{- range . }}
        - {{ toYaml . | nindent 10 | trim }}
          labelSelector:
            matchLabels: {{- $selector | nindent 14 }}
        {{- end }}
      {{- end }}
      containers:
        - name: {{ .component }}
          image: {{ include "kvevents.image" $root | quote }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          args: {{- toYaml (concat .args $values.extraArgs) | nindent 12 }}
          env:
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            {{- with $values.extraEnv }}{{ toYaml . | nindent 12 }}{{ end }}
          ports:
            - {name: {{ .port.name }}, containerPort: {{ .port.number }}}
          # It reads its own snapshots before it answers.
          startupProbe:
            httpGet: {path: /livez, port: {{ .port.name }}, scheme: {{ .scheme }}}
            periodSeconds: 5
            timeoutSeconds: 10
            failureThreshold: 60
          readinessProbe:
            httpGet: {path: /readyz, port: {{ .port.name }}, scheme: {{ .scheme }}}
            periodSeconds: 5
            timeoutSeconds: 10
          livenessProbe:
            httpGet: {path: /livez, port: {{ .port.name }}, scheme: {{ .scheme }}}
            periodSeconds: 20
            timeoutSeconds: 10
          resources: {{- toYaml $values.resources | nindent 12 }}
          securityContext: {{- toYaml $root.Values.securityContext | nindent 12 }}
          volumeMounts:
            - {name: config, mountPath: /etc/kvevents/config, readOnly: true}
            - {name: temporary, mountPath: /tmp}
            {{- with concat .mounts $values.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
      volumes:
        - name: config
          configMap: {name: {{ $name }}}
        {{- toYaml (concat .volumes $values.extraVolumes) | nindent 8 }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{- include "kvevents.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- $selector | nindent 6 }}
{{- end -}}
