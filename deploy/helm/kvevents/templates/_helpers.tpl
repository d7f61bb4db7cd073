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

{{/* The component that follows engines. */}}
{{- define "kvevents.follower" -}}
{{ ternary "serve" "bridge" (eq .Values.mode "serve") }}
{{- end -}}

{{- define "kvevents.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvevents.fullname" .) }}
{{- end -}}

{{/* Name of the Secret with tokens. */}}
{{- define "kvevents.tokens" -}}
{{ .Values.access.secretName | default (printf "%s-tokens" (include "kvevents.fullname" .)) }}
{{- end -}}

{{/* Namespaces of the engines, as a JSON array. */}}
{{- define "kvevents.namespaces" -}}
{{ .Values.engines.namespaces | default (list .Release.Namespace) | toJson }}
{{- end -}}

{{/* A label selector, as text that `kubectl --selector` takes. */}}
{{- define "kvevents.selectorText" -}}
{{- $parts := list -}}
{{- range $key, $value := .matchLabels }}{{ $parts = append $parts (printf "%s=%s" $key $value) }}{{ end -}}
{{- range .matchExpressions -}}
{{- if eq .operator "Exists" }}{{ $parts = append $parts .key }}
{{- else if eq .operator "DoesNotExist" }}{{ $parts = append $parts (printf "!%s" .key) }}
{{- else }}{{ $parts = append $parts (printf "%s %s (%s)" .key (lower .operator) (join "," .values)) }}
{{- end -}}
{{- end -}}
{{- join "," $parts -}}
{{- end -}}

{{/* What the component that follows engines needs for it: a JSON object of arguments, mounts and volumes. */}}
{{- define "kvevents.engines" -}}
{{- $args := list -}}
{{- with .Values.engines -}}
{{- $selector := include "kvevents.selectorText" .selector -}}
{{- if $selector }}{{ $args = append $args (printf "--kubernetes-selector=%s" $selector) }}
{{- else if not .pools }}{{ fail "engines.selector: which pods are engines, such as --set engines.selector.matchLabels.app=vllm" }}
{{- end -}}
{{- range .namespaces }}{{ $args = append $args (printf "--kubernetes-namespace=%s" .) }}{{ end -}}
{{- range .pools }}{{ $args = append $args (printf "--kubernetes-pool=%s" .) }}{{ end -}}
{{- end -}}
{{- $mounts := list -}}
{{- $volumes := list -}}
{{- with .Values.engines.curve -}}
{{- if .secretName -}}
{{- $args = concat $args (list (printf "--curve-key=/etc/kvevents/curve/%s" .key) (printf "--curve-server-key=/etc/kvevents/curve/%s" .serverKey)) -}}
{{- $mounts = list (dict "name" "curve" "mountPath" "/etc/kvevents/curve" "readOnly" true) -}}
{{- $volumes = list (dict "name" "curve" "secret" (dict "secretName" .secretName "defaultMode" 0440)) -}}
{{- end -}}
{{- end -}}
{{- dict "args" $args "mounts" $mounts "volumes" $volumes | toJson -}}
{{- end -}}

{{/* How to reach the plane, as a JSON object of arguments, mounts and volumes: (dict "root" . "login" .Values.bridge.login). */}}
{{- define "kvevents.plane" -}}
{{- $plane := .root.Values.plane -}}
{{- $args := list (printf "--plane=%s" $plane.name) -}}
{{- range $plane.servers }}{{ $args = append $args (printf "--nats=%s" .) }}{{ end -}}
{{- $mounts := list -}}
{{- $volumes := list -}}
{{- with .login -}}
{{- if .secretName -}}
{{- if and .credentials .nkey }}{{ fail "a login has credentials or nkey, not both" }}{{ end -}}
{{- if not (or .credentials .nkey) }}{{ fail "a login has a secretName; name the key in it as well: credentials, or nkey" }}{{ end -}}
{{- $args = append $args (ternary (printf "--creds=/etc/kvevents/login/%s" .credentials) (printf "--nkey=/etc/kvevents/login/%s" .nkey) (ne .credentials "")) -}}
{{- $mounts = append $mounts (dict "name" "login" "mountPath" "/etc/kvevents/login" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "login" "secret" (dict "secretName" .secretName "defaultMode" 0440)) -}}
{{- end -}}
{{- with .inboxPrefix }}{{ $args = append $args (printf "--inbox-prefix=%s" .) }}{{ end -}}
{{- end -}}
{{- with $plane.tls -}}
{{- if .secretName -}}
{{- $args = append $args (printf "--tls-ca=/etc/kvevents/tls/%s" .ca) -}}
{{- if and .certificate .key -}}
{{- $args = concat $args (list (printf "--tls-cert=/etc/kvevents/tls/%s" .certificate) (printf "--tls-key=/etc/kvevents/tls/%s" .key)) -}}
{{- end -}}
{{- $mounts = append $mounts (dict "name" "tls" "mountPath" "/etc/kvevents/tls" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "tls" "secret" (dict "secretName" .secretName "defaultMode" 0440)) -}}
{{- end -}}
{{- end -}}
{{- dict "args" $args "mounts" $mounts "volumes" $volumes | toJson -}}
{{- end -}}
