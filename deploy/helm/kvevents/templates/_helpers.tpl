{{- define "kvevents.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvevents.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Labels by which a component's pods are found: (dict "root" . "component" "bridge"). */}}
{{- define "kvevents.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvevents.labels" -}}
{{ include "kvevents.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* How to log in at the plane, as arguments: (dict "root" . "login" .Values.bridge.login). */}}
{{- define "kvevents.login.args" -}}
{{- if .login.secretName }}
{{- if and .login.credentials .login.nkey }}{{ fail "a login has credentials or nkey, not both" }}{{ end }}
{{- if not (or .login.credentials .login.nkey) }}{{ fail "a login has a secretName; name the key in it as well: credentials, or nkey" }}{{ end }}
{{- if .login.credentials }}
- --creds=/etc/kvevents/login/{{ .login.credentials }}
{{- else }}
- --nkey=/etc/kvevents/login/{{ .login.nkey }}
{{- end }}
{{- end }}
{{- with .login.inboxPrefix }}
- --inbox-prefix={{ . }}
{{- end }}
{{- with .root.Values.plane.tls }}
{{- if .secretName }}
- --tls-ca=/etc/kvevents/tls/{{ .ca }}
{{- if and .certificate .key }}
- --tls-cert=/etc/kvevents/tls/{{ .certificate }}
- --tls-key=/etc/kvevents/tls/{{ .key }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvevents.login.mounts" -}}
{{- if .login.secretName }}
- {name: login, mountPath: /etc/kvevents/login, readOnly: true}
{{- end }}
{{- if .root.Values.plane.tls.secretName }}
- {name: tls, mountPath: /etc/kvevents/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvevents.login.volumes" -}}
{{- if .login.secretName }}
- name: login
  secret: {secretName: {{ .login.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.plane.tls.secretName }}
- name: tls
  secret: {secretName: {{ .root.Values.plane.tls.secretName | quote }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Fails unless the ports of all ranks differ: (dict "ranks" 4 "name" "engines.port" "port" 6557 "replayName" .. "replayPort" 6567). */}}
{{- define "kvevents.apart" -}}
{{- $distance := max (sub .port .replayPort) (sub .replayPort .port) -}}
{{- if lt $distance (int .ranks) -}}
{{- fail (printf "engines.ranks is %d, so %s and %s must be %d or more apart: they are %d and %d, and the ports of ranks are counted up from both" (int .ranks) .name .replayName (int .ranks) (int .port) (int .replayPort)) -}}
{{- end -}}
{{- end -}}

{{/* Name of the pod, as the name of a bridge or replica. */}}
{{- define "kvevents.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}
