{{/* SPDX-License-Identifier: Apache-2.0 */}}

{{- define "weft.labels" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "weft.selector" -}}
app.kubernetes.io/name: weft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "weft.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What agent and operator both have to know. */}}
{{- define "weft.options" -}}
{{- $options := dict "cluster-id" .Values.cluster.id "max-connected-clusters" .Values.cluster.maxConnectedClusters }}
{{- if .Values.cluster.name }}{{ $_ := set $options "cluster-name" .Values.cluster.name }}{{ end }}
{{- if .Values.kvstore.secret }}{{ $_ := set $options "kvstore-config" "/etc/weft/kvstore/config" }}{{ end }}
{{- toYaml $options }}
{{- end }}

{{- define "weft.agentOptions" -}}
{{- $options := include "weft.options" . | fromYaml }}
{{- $_ := set $options "routing-mode" .Values.agent.routingMode }}
{{- $_ := set $options "kubernetes" .Values.agent.kubernetes }}
{{- $_ := set $options "metrics-address" .Values.agent.metricsAddress }}
{{- $_ := set $options "bpffs" .Values.agent.bpffs }}
{{- $_ := set $options "state-dir" .Values.agent.stateDir }}
{{- if .Values.cluster.id }}{{ $_ := set $options "clustermesh-config" "/etc/weft/clustermesh" }}{{ end }}
{{- toYaml (mergeOverwrite $options .Values.agent.options) }}
{{- end }}

{{- define "weft.operatorOptions" -}}
{{- $options := include "weft.options" . | fromYaml }}
{{- $_ := set $options "kubernetes" true }}
{{- $_ := set $options "election" "kubernetes" }}
{{- $_ := set $options "namespace" .Release.Namespace }}
{{- $_ := set $options "metrics-address" .Values.operator.metricsAddress }}
{{- toYaml (mergeOverwrite $options .Values.operator.options) }}
{{- end }}

{{/* Host and port of an address of the loopback device. */}}
{{- define "weft.probe" -}}
host: {{ regexReplaceAll ":[0-9]+$" .address "" | trimAll "[]" | quote }}
port: {{ regexFind "[0-9]+$" .address }}
path: {{ .path }}
{{- end }}

{{- define "weft.operates" -}}
{{- if and .Values.operator.enabled .Values.kvstore.secret }}yes{{ end }}
{{- end }}
