{{/*
A relay beside an engine, for `containers` of the engine's pod; the pod needs the labels of `engines.selector`. From a chart of
which this one is a dependency:

    {{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 8 }}
*/}}
{{- define "kvevents.relay.container" -}}
{{- $relay := .root.Values.relay -}}
- name: kvevents-relay
  image: {{ include "kvevents.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args:
    - relay
    - {{ $relay.upstream | quote }}
    - --endpoint={{ $relay.endpoint }}
    - --replay-endpoint={{ $relay.replayEndpoint }}
    - --heartbeat={{ $relay.heartbeatSeconds }}
    - --tokens={{ $relay.tokens }}
    - --metrics-host=0.0.0.0
    - --metrics-port={{ $relay.metricsPort }}
  ports:
    - {name: kv-events, containerPort: {{ .root.Values.engines.port }}}
    - {name: kv-replay, containerPort: {{ .root.Values.engines.replayPort }}}
    - {name: kv-metrics, containerPort: {{ $relay.metricsPort }}}
  livenessProbe:
    httpGet: {path: /metrics, port: kv-metrics}
    periodSeconds: 20
    timeoutSeconds: 5
  resources: {{- toYaml $relay.resources | nindent 4 }}
  securityContext: {{- toYaml (merge (dict "runAsNonRoot" true "runAsUser" .root.Values.podSecurityContext.runAsUser) .root.Values.securityContext) | nindent 4 }}
{{- end -}}
