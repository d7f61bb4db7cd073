{{/*
A relay beside an engine, for `containers` of the engine's pod; one for each rank. The pod needs the labels of `engines.selector`. From
a chart of which this one is a dependency:

    {{- include "kvevents.relay.container" (dict "root" .Subcharts.kvevents) | nindent 8 }}
*/}}
{{- define "kvevents.relay.container" -}}
{{- $root := .root -}}
{{- $relay := $root.Values.relay -}}
{{- $engines := $root.Values.engines -}}
{{- $ranks := int $engines.ranks -}}
{{- include "kvevents.apart" (dict "ranks" $ranks "name" "engines.port" "port" $engines.port "replayName" "engines.replayPort" "replayPort" $engines.replayPort) -}}
{{- include "kvevents.apart" (dict "ranks" $ranks "name" "relay.enginePort" "port" $relay.enginePort "replayName" "relay.engineReplayPort" "replayPort" $relay.engineReplayPort) -}}
{{- range $rank := until $ranks -}}
{{- if $rank }}
{{ end -}}
- name: kvevents-relay{{ if gt $ranks 1 }}-{{ $rank }}{{ end }}
  image: {{ include "kvevents.image" $root | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args:
    - relay
    - {{ if $rank }}engine:{{ $rank }}={{ end }}tcp://127.0.0.1:{{ add $relay.enginePort $rank }},tcp://127.0.0.1:{{ add $relay.engineReplayPort $rank }}
    - --endpoint=tcp://0.0.0.0:{{ add $engines.port $rank }}
    - --replay-endpoint=tcp://0.0.0.0:{{ add $engines.replayPort $rank }}
    - --heartbeat={{ $relay.heartbeatSeconds }}
    - --token-policy={{ $relay.tokenPolicy }}
    - --metrics-host=0.0.0.0
    - --metrics-port={{ add $relay.metricsPort $rank }}
  ports:
    {{- $suffix := ternary "" (printf "-%d" $rank) (eq $rank 0) }}
    - {name: kv-events{{ $suffix }}, containerPort: {{ add $engines.port $rank }}}
    - {name: kv-replay{{ $suffix }}, containerPort: {{ add $engines.replayPort $rank }}}
    - {name: kv-metrics{{ $suffix }}, containerPort: {{ add $relay.metricsPort $rank }}}
  livenessProbe:
    httpGet: {path: /metrics, port: kv-metrics{{ $suffix }}}
    periodSeconds: 20
    timeoutSeconds: 5
  resources: {{- toYaml $relay.resources | nindent 4 }}
  securityContext: {{- toYaml (merge (dict "runAsNonRoot" true "runAsUser" $root.Values.podSecurityContext.runAsUser) $root.Values.securityContext) | nindent 4 }}
{{- end -}}
{{- end -}}
